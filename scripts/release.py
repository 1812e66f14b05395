"""Make a release, dry: build everything that would be uploaded, check it, install it, try it.

    poe release [flags of scripts/wheel.py]

The sdist, the pure wheel and the wheel with kernels land in `dist`. Nothing is uploaded. The exit
status is the number of steps that failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import wheel
from rich.console import Console

import fused_norm

ROOT = wheel.ROOT
DIST = ROOT / "dist"


def main() -> int:
    """Run the steps in order, as far as the earlier ones held, and return how many failed."""
    console = Console()
    steps: dict[str, Callable[[], str]] = {
        "changelog": _changelog,
        "wheels": lambda: _wheels(sys.argv[1:]),
        "sdist": _sdist,
        "metadata": lambda: _run(sys.executable, "-m", "twine", "check", "--strict", *_files()),
        "platform": _platform,
        "installed": _installed,
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
    console.print("nothing was uploaded" if not failed else f"{failed} steps failed")
    return failed


def _changelog() -> str:
    version = fused_norm.__version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    first = headings[0] if headings else "nothing"
    if first != "Unreleased" and version not in first.split():
        raise RuntimeError(f"CHANGELOG.md begins with {first}, and the version is {version}")
    return f"{version}, {first}"


def _wheels(flags: list[str]) -> str:
    shutil.rmtree(DIST, ignore_errors=True)
    if wheel.main([*flags, "--output", str(DIST)]):
        raise RuntimeError("scripts/wheel.py failed")
    return "a pure one and one with kernels"


def _sdist() -> str:
    return _run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(DIST))


def _platform() -> str:
    """Have auditwheel say which systems the wheel runs on: those that its tag names.

    It holds the versions of the C and C++ libraries against them. PyTorch's libraries, which nodes
    load, it cannot know: PyTorch has loaded them before.
    """
    said = " ".join(_run(sys.executable, "-m", "auditwheel", "show", str(_wheel())).split())
    found = re.search(r'constrains the platform tag to "(\w+)"', said)
    if found is None or not wheel.TAG.endswith(found[1]):
        raise RuntimeError(f"the wheel's tag is {wheel.TAG}, and auditwheel finds:\n{said}")
    return found[1]


def _installed() -> str:
    """Install the wheel as users do, with what it requires and no more, and run it."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise RuntimeError("there is no uv to install the wheel with")
    with tempfile.TemporaryDirectory() as folder:
        _run(uv, "venv", "--quiet", "--python", sys.executable, folder)
        python = str(Path(folder) / "bin" / "python")
        _run(uv, "pip", "install", "--quiet", "--python", python, str(_wheel()))
        environment = {"FUSED_NORM_CACHE_DIR": str(Path(folder) / "cache")}
        script = str(ROOT / "scripts" / "try_wheel.py")
        _run(python, "-W", "ignore", script, cwd=folder, **environment)
    return "forward, backward, module and compiler, with neither max nor mojo"


def _wheel() -> Path:
    (path,) = DIST.glob(f"*-{wheel.TAG}.whl")
    return path


def _files() -> list[str]:
    return sorted(str(path) for path in DIST.iterdir())


def _run(*command: str, cwd: str | Path = ROOT, **variables: str) -> str:
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} ...\n{result.stdout[-4000:]}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
