"""Run every static check of the repository and report all that fail.

    poe check

Formatting and lint (ruff, mblack), types (mypy), Mojo docstrings (mojo doc), the puzzle to fill in
(scripts/problem.py), the words of the pages (scripts/prose.py), and the site of docs/ (mkdocs) with
its links (scripts/pages/links.py). The exit status is the number of checks that failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

MOJO_SOURCES = ["op", "fused_norm/native", "tutorial", "problems", "tests/mojo"]

CHECKS = {
    "python format": ["ruff", "format", "--check", "."],
    "python lint": ["ruff", "check", "."],
    "python types": ["mypy"],
    "mojo format": ["mblack", "-l", "80", "--include", r"\.mojo$", "--check", "-q", *MOJO_SOURCES],
    "mojo docstrings": [
        *("mojo", "doc", "--diagnose-missing-doc-strings", "--Werror"),
        *("-o", "/dev/null", "op"),
    ],
    "puzzle": [sys.executable, "scripts/problem.py", "--check"],
    "prose": [sys.executable, "scripts/prose.py"],
    "documentation": ["mkdocs", "build", "--strict"],
    "links": [sys.executable, "scripts/pages/links.py"],
}


# Of a fresh clone this takes as long as all others.
LONGEST = "python types"


def main() -> int:
    """Run the checks and return the number that failed."""
    console = Console()
    # The others one after another: links are those of the site that the documentation is built to.
    lanes = [LONGEST], [name for name in CHECKS if name != LONGEST]
    with console.status("checks ..."), ThreadPoolExecutor(len(lanes)) as pool:
        passed = list(pool.map(lambda names: sum(_passes(n, console) for n in names), lanes))
    failed = len(CHECKS) - sum(passed)
    console.print(f"{sum(passed)} passed, {failed} failed")
    return failed


def _passes(name: str, console: Console) -> bool:
    """Run a check, print what became of it, and return whether it passed."""
    start = time.perf_counter()
    result = subprocess.run(CHECKS[name], capture_output=True, text=True, check=False)
    ok = result.returncode == 0
    console.print(f"{name:<18} {'ok' if ok else 'FAILED'}  {time.perf_counter() - start:5.1f} s")
    if not ok:
        console.print(result.stdout + result.stderr, markup=False, highlight=False)
    return ok


if __name__ == "__main__":
    sys.exit(main())
