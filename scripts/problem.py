"""Write the puzzle to fill in from its solution: problems/p22/op from op/puzzle.

    python scripts/problem.py            write it
    python scripts/problem.py --check    exit 1 if it is not what the solution gives

A part to fill in begins with a comment that says FILL IN, how long it is, and gives hints; the
problem keeps it, and drops what follows up to END. Files without such a part are links.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOLUTION = ROOT / "op" / "puzzle"
PROBLEM = ROOT / "problems" / "p22" / "op"
PART = re.compile(
    r"^(?P<hints> *# FILL IN \(roughly \d+ lines\)\n(?: *# [^\n]*\n)*)\n(?P<code>.*?)^ *# END\n",
    re.MULTILINE | re.DOTALL,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the problem and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if it is stale")
    options = parser.parse_args(arguments)
    names = {path.name for path in SOLUTION.iterdir() if path.suffix == ".mojo"}
    stale = sorted({path.name for path in PROBLEM.iterdir()} - names)
    stale += [name for name in sorted(names) if not is_current(name)]
    if options.check:
        for name in stale:
            print(
                f"problems/p22/op/{name} is not what op/puzzle gives: scripts/problem.py writes it"
            )
        return 1 if stale else 0
    for name in stale:
        (PROBLEM / name).unlink(missing_ok=True)
        if name in names:
            write(name)
        print(f"wrote problems/p22/op/{name}" if name in names else f"removed {name}")
    return 0


def problem(solution: str) -> str:
    """Return a file of the problem.

    Args:
        solution: The same file of the solution.
    """
    return PART.sub(lambda part: part["hints"], solution)


def is_current(name: str) -> bool:
    """Return whether a file of the problem is what the solution gives.

    Args:
        name: Of the file.
    """
    text, path = (SOLUTION / name).read_text(), PROBLEM / name
    if not path.exists() or path.is_symlink() is bool(PART.search(text)):
        return False
    return path.read_text() == problem(text)


def write(name: str) -> None:
    """Write a file of the problem.

    Args:
        name: Of the file.
    """
    text = (SOLUTION / name).read_text()
    if PART.search(text):
        (PROBLEM / name).write_text(problem(text))
    else:
        (PROBLEM / name).symlink_to(os.path.relpath(SOLUTION / name, PROBLEM))


if __name__ == "__main__":
    sys.exit(main())
