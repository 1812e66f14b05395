"""Install a wheel as users do, with versions of PyTorch, try it, and record the results.

    python scripts/wheel/wheel_trial.py WHEEL [--torch VERSION ...] [--lowest] [--gpu FILE]
        [--commit COMMIT] [--output TO]

Each trial is an environment of its own with the wheel and what it requires, gone afterwards. In it
`try_wheel.py` runs forward, backward, the module and the compiler against PyTorch, and
`doctor` reports. A trial fails where a result differs, or where kernels or a node that are in the
wheel do not serve. The file gets the wheel's size and content too, and what `try_wheel.py` printed
on a machine with a GPU. docs/guide/install.md gets its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import cubins
from rich.console import Console

from benchmarks import environment, markdown

ROOT = Path(__file__).resolve().parents[2]
TRY = ROOT / "scripts/wheel/try_wheel.py"
# A first run reads PyTorch from the disk; times are those of the later ones.
RUNS = 4
PAGE = ROOT / "docs" / "guide" / "install.md"
# Of this process' environment: the checkout's packages, and that modules are not to be compiled.
LEFT_OUT = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
# Instead of a version of PyTorch: the oldest that the wheel allows of all that it requires.
LOWEST = "lowest"


def main(arguments: list[str] | None = None) -> int:
    """Try a wheel and return how many trials failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", action="append", help="such as 2.12; default: the newest")
    parser.add_argument("--lowest", action="store_true", help="the oldest of what it requires, too")
    parser.add_argument("--gpu", type=Path, help="what try_wheel.py printed where there is a GPU")
    parser.add_argument("--commit", help="that the wheel was built from; default: this checkout's")
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args(arguments)
    console = Console()
    commit = options.commit or environment.checkout()
    found: dict[str, Any] = {"commit": commit, "content": content(options.wheel), "trials": []}
    failed = 0
    for version in [*(options.torch or [None]), *([LOWEST] if options.lowest else [])]:
        try:
            said = trial(options.wheel, version)
        except RuntimeError as error:
            failed += 1
            console.print(f"PyTorch {version}: FAILED\n{error}", markup=False, highlight=False)
        else:
            found["trials"].append(said)
            console.print(line(said), markup=False, highlight=False)
    if options.gpu:
        found["gpu"] = _printed(options.gpu.read_text())
    if options.output and not failed:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(markdown.filled(PAGE.read_text(), {"wheel": figures(found)}))
    return failed


def line(said: dict[str, Any]) -> str:
    """Return what a trial found, in one line.

    Args:
        said: As `trial` returned it.
    """
    dtypes = ", ".join(said["cpu"])
    first = max(times["first_s"] for times in said["cpu"].values())
    return (
        f"Python {said['python']}, PyTorch {said['torch']}: {dtypes}; {said['node']}; "
        f"import {said['import_s']:.3f} s, first forward {first:.3f} s"
    )


def figures(found: dict[str, Any]) -> str:
    """Return what a page says of the wheel: its size, its kernels, and the trials.

    Args:
        found: What the file holds.
    """
    kinds = found["content"]["kinds"]
    gpus = {name.split("_", 1)[1]: kind for name, kind in kinds.items() if "_" in name}
    size = found["content"]["bytes"] / 1e6
    kernels = ", ".join(f"{kind['kernels']} for {name}" for name, kind in gpus.items())
    texts = sum(kind["kernels"] - kind["cubins"] for kind in gpus.values())
    form = f"machine code but for {texts}, which the driver compiles" if texts else "machine code"
    lines = [
        f"The wheel of commit {found['commit']} is {size:.1f} MB. "
        f"Its GPU kernels, {kernels}, are {form}.",
        "Installed with what it requires and no more, it ran with these, in fresh processes:",
        "",
        "| PyTorch | Python | node | `import fused_norm` | first forward on a CPU |",
        "|---|---|---|---|---|",
    ]
    for said in found["trials"]:
        first = max(times["first_s"] for times in said["cpu"].values())
        others = ", the oldest of all it requires" if said["lowest"] else ""
        lines.append(
            f"| {said['torch']}{others} | {said['python']} | {said['node']} | "
            f"{said['import_s'] * 1000:.0f} ms | {first * 1000:.0f} ms |"
        )
    return "\n".join(lines) + "\n"


def trial(wheel: Path, version: str | None = None) -> dict[str, Any]:
    """Install a wheel into an environment of its own and try it there.

    Args:
        wheel: The wheel.
        version: Of PyTorch, such as `2.12`; `LOWEST`, or None for the newest.

    Raises:
        RuntimeError: If it does not install, or does not do what it should.
    """
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise RuntimeError("there is no uv to install the wheel with")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _apart(uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"), cwd=folder)
        inner = str(folder / "venv" / "bin" / "python")
        wanted = [str(wheel.resolve())]
        if version == LOWEST:
            wanted += [*_required(wheel), "--resolution", "lowest-direct"]
        elif version:
            wanted.append(f"torch=={version}.*")
        _apart(uv, "pip", "install", "--quiet", "--python", inner, *wanted, cwd=folder)
        runs = []
        for _ in range(RUNS):
            printed = _apart(inner, "-W", "ignore", str(TRY), cwd=folder)
            runs.append(_printed(printed.replace(f"{folder}/", "")))
        said = _least(runs)
        report = _apart(inner, "-m", "fused_norm", "doctor", cwd=folder)
        if (folder / "cache").exists():
            raise RuntimeError("something was built where all should have come with the wheel")
    _compare(said, report, wheel)
    return {**said, "lowest": version == LOWEST}


def _required(wheel: Path) -> list[str]:
    """Return what a wheel requires without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ")]
    return [requirement for requirement in required if ";" not in requirement]


def _compare(said: dict[str, Any], report: str, wheel: Path) -> None:
    """Raise where not all that a wheel has for this machine served."""
    with zipfile.ZipFile(wheel) as archive:
        files = {Path(name).name for name in archive.namelist()}
    said["node"] = Path(said["node"] or "Python's").name
    node = f"node-torch-{'.'.join(said['torch'].split('.')[:2])}.so"
    if node in files and (said["node"] != node or not re.search(r"C\+\+, prebuilt", report)):
        raise RuntimeError(f"{said['node']} serves, not {node}\n{report}")
    dtypes = {file.split("-")[1] for file in files if file.startswith("norm_linear_cpu-")}
    if dtypes != said["cpu"].keys():
        raise RuntimeError(f"{sorted(said['cpu'])} came for this CPU, not {sorted(dtypes)}")


def content(wheel: Path) -> dict[str, Any]:
    """Return a wheel's size, and what is in it by kind: files, bytes, and kernels for GPUs.

    Args:
        wheel: The file.
    """
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            kind = _kind(member.filename)
            kinds[kind].update(files=1, packed=member.compress_size, bytes=member.file_size)
            if "nvidia" in kind:
                found = cubins.count(archive.read(member))
                kinds[kind].update(kernels=found.kernels, cubins=found.cubins)
    size = wheel.stat().st_size
    return {"name": wheel.name, "bytes": size, "kinds": dict(sorted(kinds.items()))}


def _kind(member: str) -> str:
    file = Path(member)
    if file.parent.name == "lib":
        return "runtime"
    if file.parent.name != "prebuilt":
        return "texts and Python"
    if file.name == "chain.so":
        return "chain"
    return "nodes" if file.name.startswith("node-") else f"kernels {file.stem.rsplit('-', 1)[1]}"


def _printed(text: str) -> Any:
    """Return what `try_wheel.py` found, among all that was printed."""
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def _least(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what runs said, each time the least of those after the first."""
    said = runs[0]
    said["import_s"] = min(run["import_s"] for run in runs[1:])
    for device in said.keys() & {"cpu", "cuda"}:
        for dtype, times in said[device].items():
            for name in times:
                times[name] = min(run[device][dtype][name] for run in runs[1:])
    return said


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command in a folder, and return what it printed.

    Args:
        command: The command.
        cwd: The folder.
        env: The whole environment, None for this process's.

    Raises:
        RuntimeError: If it fails, with the end of what it printed.
    """
    result = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:5])} ...\n{result.stdout[-4000:]}")
    return result.stdout


def _apart(*command: str, cwd: Path) -> str:
    """Run a command in a folder, with a cache of kernels there and nothing of a checkout's."""
    kept = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}
    return run(
        *command,
        cwd=cwd,
        env={**kept, "FUSED_NORM_CACHE_DIR": str(cwd / "cache"), "COLUMNS": "500"},
    )


if __name__ == "__main__":
    sys.exit(main())
