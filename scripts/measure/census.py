"""Counts what the backend of torch.compile fuses in models that others wrote, and how exactly.

Every model of tests/models/zoo.py is run untouched and rewritten, two layers deep, forward and
backward, in float32 on a CPU; and its norms are counted at its true depth. `python
scripts/measure/census.py` writes benchmarks/results/census.json, which tests hold the backend
against, after each model; those that are named are counted again, and others stay; `--missing`
counts what the file lacks. It needs the dependency group `models`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))
PATH = ROOT / "benchmarks" / "results" / "census.json"
DEEP = "true depth"
_COUNTS = ("norms", "read by Linear", "fused")


def counts(sites: list[Any], graphs: int) -> dict[str, Any]:
    """Return how many norms there are, and what became of them.

    Args:
        sites: What became of each.
        graphs: How many graphs there are of the model.
    """
    read = [site for site in sites if site.linears]
    return {
        "graphs": graphs,
        "norms": len(sites),
        "read by Linear": len(read),
        "fused": sum(site.fused for site in read),
        "left": dict(Counter(site.reason for site in read if not site.fused)),
    }


def count(name: str) -> dict[str, Any]:
    """Return what became of a model's norms, two layers deep, and how exact the results are.

    Args:
        name: Of an entry of the zoo.
    """
    found = importlib.import_module("compare").compare(name)
    return {
        **counts(found.sites, found.graphs),
        "output error": found.output_error,
        "gradient error": found.gradient_error,
    }


def total(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the sums over models.

    Args:
        rows: Of models.
    """
    return {key: sum(row[key] for row in rows) for key in _COUNTS} | {"models": len(rows)}


def write(path: Path, rows: dict[str, dict[str, Any]], order: list[str]) -> None:
    """Write the file.

    Args:
        path: Where to.
        rows: By the names of models.
        order: All names.
    """
    models = [rows[name] for name in order if name in rows]
    known = [row for row in models if "fused" in row]
    deep = [row[DEEP] for row in models if DEEP in row]
    written = {
        "torch": torch.__version__,
        "total": total(known),
        DEEP: total(deep),
        "models": models,
    }
    path.write_text(json.dumps(written, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Count, print a line a model, write the file, and return 1 if one could not be counted.

    Args:
        arguments: Those of the command line.
    """
    zoo = importlib.import_module("zoo").ZOO
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=list(zoo), help="some of the zoo's (default: all)"
    )
    parser.add_argument("--depth", choices=["two", "true", "both"], default="both")
    parser.add_argument("--missing", action="store_true", help="count what the file lacks alone")
    parser.add_argument("--output", type=Path, default=PATH, help="file to write")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, Any]] = {}
    if asked.output.exists() and (asked.missing or len(asked.models) < len(zoo)):
        rows = {row["model"]: row for row in json.loads(asked.output.read_text())["models"]}
    failed: list[str] = []
    for name in asked.models:
        row = rows.setdefault(name, {"model": name, "family": zoo[name][0]})
        start = time.perf_counter()
        if asked.depth != "true" and not (asked.missing and "fused" in row):
            row |= count(name)
            errors = f"{row['output error']:.1e}  gradients {row['gradient error']:.1e}"
            _say(name, row, f"outputs {errors}", start)
        start = time.perf_counter()
        if asked.depth != "two" and not (asked.missing and DEEP in row):
            try:
                row[DEEP] = counts(*importlib.import_module("compare").look(name, True))
                _say(name, row[DEEP], DEEP, start)
            except Exception as error:
                # A model of others may not take the zoo's small inputs at its true depth.
                failed.append(name)
                print(f"{name:30} {DEEP}: {type(error).__name__}", flush=True)
        write(asked.output, rows, list(zoo))
        torch.compiler.reset()
        gc.collect()
    return int(bool(failed))


def _say(name: str, row: dict[str, Any], words: str, start: float) -> None:
    print(
        f"{name:30} {row['fused']:3} of {row['read by Linear']:3}  {words}  "
        f"{time.perf_counter() - start:.0f} s  {row['left'] or ''}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
