"""Counts what the backend of torch.compile fuses in models that others wrote, and how exactly.

Every model of tests/models/zoo.py is run untouched and rewritten, forward and backward, in float32
on a CPU: `python scripts/census.py` writes benchmarks/census.json, which tests hold the backend
against; models that are named are counted anew, and others stay. It needs the dependency group
`models`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))
PATH = ROOT / "benchmarks" / "census.json"


def count(name: str) -> dict[str, Any]:
    """Return what became of a model's norms.

    Args:
        name: Of an entry of the zoo.
    """
    compare = importlib.import_module("compare").compare
    zoo = importlib.import_module("zoo").ZOO

    found = compare(name)
    left = Counter(site.reason for site in found.with_linear if not site.fused)
    return {
        "model": name,
        "family": zoo[name][0],
        "graphs": found.graphs,
        "norms": len(found.sites),
        "read by Linear": len(found.with_linear),
        "fused": sum(site.fused for site in found.with_linear),
        "left": dict(left),
        "output error": found.output_error,
        "gradient error": found.gradient_error,
    }


def main(arguments: list[str] | None = None) -> int:
    """Count, print a line a model, and write the file.

    Args:
        arguments: Those of the command line.
    """
    zoo = importlib.import_module("zoo").ZOO
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=list(zoo), help="some of the zoo's (default: all)"
    )
    parser.add_argument("--output", type=Path, default=PATH, help="file to write")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    if len(asked.models) < len(zoo) and asked.output.exists():
        rows = json.loads(asked.output.read_text())["models"]
    for name in asked.models:
        start = time.perf_counter()
        row = count(name)
        rows = [each for each in rows if each["model"] != name] + [row]
        rows.sort(key=lambda each: list(zoo).index(each["model"]))
        print(
            f"{name:30} {row['fused']:3} of {row['read by Linear']:3}  outputs "
            f"{row['output error']:.1e}  gradients {row['gradient error']:.1e}  "
            f"{time.perf_counter() - start:.0f} s  {row['left'] or ''}",
            flush=True,
        )
        total = {key: sum(r[key] for r in rows) for key in ("norms", "read by Linear", "fused")}
        total["models"] = len(rows)
        written = {"torch": torch.__version__, "total": total, "models": rows}
        asked.output.write_text(json.dumps(written, indent=1) + "\n")
    print(f"{total['fused']} of {total['read by Linear']} norms that Linear layers read are fused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
