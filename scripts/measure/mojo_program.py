"""Programs in Mojo that print what kernels plan for a GPU, on any machine."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(source: str, arguments: Iterable[object]) -> list[str]:
    """Return the lines that a program prints.

    Args:
        source: Its file, below the repository's root.
        arguments: Those of its command line.
    """
    command = [str(_built(source)), *map(str, arguments)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@functools.cache
def _built(source: str) -> Path:
    """Build a program once in a process: that takes much longer than to run it."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = Path(folder) / "program"
    command = ["mojo", "build", "-I", ".", source, "-o", str(program)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return program
