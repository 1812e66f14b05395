"""Mojo's compiler, and programs in tests/mojo that print what is planned for a GPU anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from fused_norm.devices import choice, hopper

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts/measure"))

import mojo_program

needs_mojo = pytest.mark.skipif(
    shutil.which("mojo") is None, reason="no Mojo compiler on this machine"
)


def mojo(*arguments: str) -> None:
    """Run the compiler, which has to succeed and to say nothing."""
    command = ["mojo", *arguments]
    result = subprocess.run(
        command, cwd=mojo_program.ROOT, capture_output=True, text=True, check=False
    )
    said = [line for line in result.stderr.splitlines() if "Crashpad" not in line]
    assert result.returncode == 0, result.stderr
    assert not said, result.stderr


def h100_costs(folder: Path, *dtypes: str) -> list[Path]:
    """Write what forwards were measured to cost on an H100 to a file for each dtype."""
    device = hopper.load(choice.SHIPPED / "nvidia-h100.json")
    files = [folder / dtype for dtype in dtypes]
    for file in files:
        file.write_bytes(device.as_array(file.name).tobytes())
    return files


def printed(program: str, files: Sequence[Path], cases: Iterable[Sequence[int]]) -> list[str]:
    """Return the lines that a program prints for cases, each some integers."""
    numbers = [int(number) for case in cases for number in case]
    return mojo_program.printed(f"tests/mojo/{program}.mojo", [*files, *numbers])
