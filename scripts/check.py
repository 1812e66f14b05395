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


def main() -> int:
    """Run the checks in order and return the number that failed."""
    console = Console()
    failed = []
    for name, command in CHECKS.items():
        start = time.perf_counter()
        with console.status(f"{name} ..."):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        ok = result.returncode == 0
        console.print(
            f"{name:<18} {'ok' if ok else 'FAILED'}  {time.perf_counter() - start:5.1f} s"
        )
        if not ok:
            failed.append(name)
            console.print(result.stdout + result.stderr, markup=False, highlight=False)
    console.print(f"{len(CHECKS) - len(failed)} passed, {len(failed)} failed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
