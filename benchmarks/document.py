"""The results of a benchmark that measures case after case, shown and written as they come."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environment import describe, version


def new(device: torch.device, commit: str | None, *packages: str) -> dict[str, Any]:
    """Return a document without cases.

    Args:
        device: What is measured.
        commit: Of the sources, where there is no repository.
        packages: Those whose versions it has.
    """
    return {
        "environment": dataclasses.asdict(describe(device, commit)),
        "versions": {name: version(name) for name in packages},
        "cases": [],
    }


def write_rows(path: Path, head: dict[str, Any], name: str, rows: Iterable[Sequence[Any]]) -> None:
    """Write a document whose last entry has each of its rows on a line.

    Args:
        path: Of the file.
        head: The other entries.
        name: Of the last entry.
        rows: Its rows.
    """
    lines = ",\n".join(f"  {json.dumps(list(row))}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "{name}": [\n{lines}\n ]\n}}\n')


def show(case: dict[str, Any], table: Table) -> None:
    """Print the table of a case, and what failed in it.

    Args:
        case: The case.
        table: Of its results.
    """
    Console().print(table, soft_wrap=True)
    for who, result in case["results"].items():
        if "error" in result:
            print(f"{who}: {result['error']}", flush=True)


def write(document: dict[str, Any], path: Path | None) -> None:
    """Free what a case has left, and write the document if there is a path.

    Args:
        document: All cases so far.
        path: Of the file.
    """
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    if path:
        path.write_text(json.dumps(document, indent=1, default=str) + "\n")
