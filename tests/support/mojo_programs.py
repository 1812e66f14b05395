"""Programs in tests/mojo, which print what is planned for a GPU on any machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from fused_norm.devices import choice, hopper

ROOT = Path(__file__).resolve().parents[2]
needs_mojo = pytest.mark.skipif(
    not subprocess.run(["which", "mojo"], capture_output=True, check=False).stdout,
    reason="no Mojo compiler on this machine",
)


def h100_costs(folder: Path, *dtypes: str) -> list[Path]:
    """Write what forwards were measured to cost on an H100 to a file for each dtype."""
    device = hopper.load(choice.SHIPPED / "nvidia-h100.json")
    files = [folder / dtype for dtype in dtypes]
    for file in files:
        file.write_bytes(device.as_array(file.name).tobytes())
    return files


def printed(program: str, files: Sequence[Path], cases: Iterable[Sequence[int]]) -> list[str]:
    """Return the lines that a program prints for cases, each some integers."""
    numbers = [str(int(number)) for case in cases for number in case]
    command = ["mojo", "run", "-I", ".", f"tests/mojo/{program}.mojo", *map(str, files), *numbers]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()
