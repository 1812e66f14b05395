"""Record what Puzzle 22 does on this GPU: the driver's three modes, and two sanitizers.

    python scripts/measure/record_p22.py docs/h200-p22.txt

The sanitizers run every GPU kernel of the puzzle (tests/mojo/puzzle_kernels.mojo) with the memory
pools of MAX and PyTorch off, since a pool hides reads past the end of an allocation. Each sanitizer
also runs kernels with a fault put into a temporary copy, and has to find it: a tool that could not
would prove nothing. The exit status is 0 only if everything held.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path("tests") / "mojo" / "puzzle_kernels.mojo"
POOLS_OFF = {
    "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE": "0",
    "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT": "0",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
}

# For each tool a fault that it has to find: file, text, replacement.
SANITIZERS = {
    "memcheck": (
        "linear.mojo",
        "row < rows and col < cols",
        "row < rows and col < cols + 1000000",
    ),
    "racecheck": ("transpose.mojo", "    barrier()\n", ""),
}


class Record:
    """Lines shown as they come and kept for the file."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.held = True

    def add(self, text: str) -> None:
        """Show and keep text."""
        print(text, flush=True)
        self.lines.append(text)

    def check(self, name: str, held: bool) -> None:
        """Add the verdict on one part."""
        self.add(f"{name}: {'OK' if held else 'FAILED'}")
        self.held = self.held and held


def main() -> int:
    """Record everything and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path, help="the file to write")
    output: Path = parser.parse_args().output
    record = Record()
    record.add(_versions())
    for mode in ("--fused", "--unfused", "--backward"):
        record.add(f"\n$ python solutions/p22/p22.py {mode}")
        result = _run([sys.executable, "solutions/p22/p22.py", mode], ROOT)
        record.add(result.stdout.rstrip())
        skipped = re.search(r"SKIPPED|INCORRECT|FAILED", result.stdout)
        record.check(f"p22 {mode}", result.returncode == 0 and not skipped)
        if result.returncode:
            record.add(result.stderr)
    with tempfile.TemporaryDirectory() as directory:
        for tool, fault in SANITIZERS.items():
            _sanitize(record, tool, fault, Path(directory))
    output.write_text("\n".join(record.lines) + "\n")
    return 0 if record.held else 1


def _sanitize(record: Record, tool: str, fault: tuple[str, str, str], directory: Path) -> None:
    """Run the kernels under a tool, as they are and with a fault."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    if tool == "memcheck":
        command += ["--leak-check", "no", "--report-api-errors", "no"]
    clean = _build(ROOT, directory / f"{tool}-clean")
    record.add(f"\n$ {' '.join(command)} puzzle_kernels")
    result = _run([*command, str(clean)], ROOT)
    record.add(result.stdout.rstrip())
    found = _errors(result.stdout)
    record.check(f"{tool} on every kernel", result.returncode == 0 and found == 0)

    copy = directory / f"{tool}-copy"
    for part in ("op", "tests"):
        shutil.copytree(ROOT / part, copy / part)
    name, text, replacement = fault
    source = copy / "op" / "puzzle" / name
    original = source.read_text()
    if original.count(text) != 1:
        raise ValueError(f"{name} must hold {text!r} once, for {tool} to have a fault to find")
    source.write_text(original.replace(text, replacement))
    result = _run([*command, str(_build(copy, directory / f"{tool}-fault"))], copy)
    found = _errors(result.stdout)
    record.add(f"\n{name} with {text.strip()!r} replaced by {replacement.strip()!r}:")
    record.add(f"========= ERROR SUMMARY: {found} errors, as there have to be")
    record.check(f"{tool} finds a fault", result.returncode != 0 and found > 0)


def _build(root: Path, program: Path) -> Path:
    command = ["mojo", "build", "--debug-level=line-tables", "-I", ".", str(PROGRAM)]
    subprocess.run([*command, "-o", str(program)], cwd=root, check=True)
    return program


def _run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    # The driver sees the pools as users have them; only sanitized programs do without.
    pools = POOLS_OFF if command[0] == "compute-sanitizer" else {}
    return subprocess.run(
        command,
        cwd=directory,
        env=os.environ | pools,
        capture_output=True,
        text=True,
        check=False,
    )


def _errors(text: str) -> int:
    """Return the number of errors or hazards in a sanitizer's summary."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if summary is None:
        raise ValueError(f"no summary in:\n{text}")
    return int(summary[1])


def _versions() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    packages = " ".join(f"{name} {version(name)}" for name in ("torch", "max", "mojo-compiler"))
    return f"{gpu}\n{packages} python {sys.version.split()[0]} cuda {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main())
