"""Make a release: build everything that is uploaded, check it, install it, try it, list uploads.

    poe release                          a dry run: nothing is uploaded
    poe release --yes --hub OWNER/NAME   uploads, if all steps held

The sdist, the pure wheel and the wheels with kernels land in `dist`, and a repository for Hugging
Face's `kernels` in `build/hub`. Other flags go to scripts/wheel/wheel.py and make a part of a
release, which is not uploaded. Twine and `hf` log in as their documentation says. The exit status
is the number of steps that failed, or that of an upload.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import hub
import upload
import wheel
import wheel_kernels
import wheel_trial
from rich.console import Console

import fused_norm

ROOT = wheel.ROOT
DIST = ROOT / "dist"
HUB = ROOT / "build" / "hub"


def main() -> int:
    """Run the steps in order, as far as the earlier ones held, and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--yes", action="store_true", help="upload; without it, a dry run")
    parser.add_argument("--repository", default="pypi", help="twine's name of the index")
    parser.add_argument("--hub", default="", metavar="OWNER/NAME", help="a repository of the Hub")
    options, flags = parser.parse_known_args()
    console = Console()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    found = upload.obstacles(fused_norm.__version__, changelog, ROOT, flags)
    if options.yes and found:
        console.print("not uploaded:", *found, sep="\n", markup=False, highlight=False)
        return len(found)
    steps: dict[str, Callable[[], str]] = {
        "changelog": _changelog,
        "wheels": lambda: _wheels(flags),
        "sdist": _sdist,
        "metadata": lambda: wheel_trial.run(
            sys.executable, "-m", "twine", "check", "--strict", *_files(), cwd=ROOT
        ),
        "platform": _platform,
        "installed": _installed,
        "hub": _hub,
    }
    failed = 0
    for name, step in steps.items():
        try:
            said = step()
        except (RuntimeError, OSError) as error:
            failed += 1
            console.print(f"{name:<10} FAILED\n{error}", markup=False, highlight=False)
            if name == "wheels":
                break
        else:
            console.print(f"{name:<10} ok  {said.strip().splitlines()[-1]}", highlight=False)
    if failed:
        console.print(f"{failed} steps failed; nothing was uploaded")
        return failed
    planned = upload.uploads(
        fused_norm.__version__, ROOT, DIST, options.repository, HUB, options.hub
    )
    status = upload.perform(planned, console, options.yes)
    if not options.hub:
        console.print("the Hub is left out: --hub OWNER/NAME says where to", highlight=False)
    if not options.yes:
        console.print("nothing was uploaded: this is a dry run, and --yes uploads", highlight=False)
        for each in found:
            console.print(f"--yes would refuse: {each}", markup=False, highlight=False)
    return status


def _changelog() -> str:
    version = fused_norm.__version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    first = headings[0] if headings else "nothing"
    if first != "Unreleased" and version not in first.split():
        raise RuntimeError(f"CHANGELOG.md begins with {first}, and the version is {version}")
    return f"{version}, {first}"


def _wheels(flags: list[str]) -> str:
    shutil.rmtree(DIST, ignore_errors=True)
    for machine in wheel_kernels.MACHINES:
        if wheel.main([*flags, "--machine", machine, "--output", str(DIST)]):
            raise RuntimeError(f"scripts/wheel/wheel.py failed for {machine}")
    return f"a pure one, and one with kernels for {', '.join(wheel_kernels.MACHINES)} each"


def _sdist() -> str:
    """Build the sdist, and from it a wheel, which has to be the pure one."""
    wheel_trial.run(
        *(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(DIST)), cwd=ROOT
    )
    (sdist,) = DIST.glob("*.tar.gz")
    (pure,) = DIST.glob("*-none-any.whl")
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        (source,) = Path(name).iterdir()
        command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", name)
        wheel_trial.run(*command, cwd=source)
        (built,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(built) as mine, zipfile.ZipFile(pure) as other:
            contents = [{n: file.read(n) for n in file.namelist()} for file in (mine, other)]
        if contents[0] != contents[1]:
            names = {n for c in contents for n in c if contents[0].get(n) != contents[1].get(n)}
            raise RuntimeError(f"its wheel is another than the checkout's: {sorted(names)}")
    return f"{sdist.name}, {sdist.stat().st_size / 1e6:.1f} MB: its wheel is the pure one"


def _platform() -> str:
    """Have auditwheel say which systems the wheels run on: those that their tags name.

    It holds the versions of the C and C++ libraries against them. PyTorch's libraries, which nodes
    load, it cannot know: PyTorch has loaded them before.
    """
    tags = []
    for machine in wheel_kernels.MACHINES:
        path = _wheel(machine)
        said = " ".join(
            wheel_trial.run(sys.executable, "-m", "auditwheel", "show", str(path), cwd=ROOT).split()
        )
        found = re.search(r'constrains the platform tag to "(\w+)"', said)
        if found is None or not path.stem.endswith(f"-{found[1]}"):
            raise RuntimeError(f"{path.name}, and auditwheel finds:\n{said}")
        tags.append(found[1])
    return ", ".join(tags)


def _installed() -> str:
    """Install the wheel as users do, with what it requires and no more, and run it."""
    return wheel_trial.line(wheel_trial.trial(_wheel(platform.machine())))


def _hub() -> str:
    """Make the repository for `kernels` of all wheels."""
    shutil.rmtree(HUB, ignore_errors=True)
    made = [path for wheel_file in sorted(DIST.glob("*.whl")) for path in hub.make(wheel_file, HUB)]
    return ", ".join(path.name for path in made)


def _wheel(machine: str) -> Path:
    (path,) = DIST.glob(f"*-{wheel.TAG.format(machine)}.whl")
    return path


def _files() -> list[str]:
    return sorted(str(path) for path in DIST.iterdir())


if __name__ == "__main__":
    sys.exit(main())
