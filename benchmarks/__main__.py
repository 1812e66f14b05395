"""`python -m benchmarks`: ops and blocks, or a benchmark with a flag of its own."""

from __future__ import annotations

import importlib
import sys

# What has a command line of its own.
OTHERS = {
    "--regret": "benchmarks.regret",
    "--head": "benchmarks.head",
    "--fp8": "benchmarks.fp8",
    "--decode": "benchmarks.decode",
}


def main() -> int:
    """Run the benchmark that the command line names and return its exit status."""
    module = "benchmarks.cli"
    for flag, other in OTHERS.items():
        if flag in sys.argv[1:]:
            module = other
    status: int = importlib.import_module(module).main()
    return status


if __name__ == "__main__":
    sys.exit(main())
