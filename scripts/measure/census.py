"""Counts what the backend of torch.compile fuses in models that others wrote, and how exactly.

Every model of zoo.py, architectures.py and wider.py in tests/models is run untouched and rewritten,
two layers deep, forward and backward, in float32 on a CPU; and the norms of those of zoo.py are
counted at their true depth. `python scripts/measure/census.py` writes
benchmarks/results/census.json, which tests hold the backend against, after each model; those that
are named are counted again, and others stay; `--missing` counts what the file lacks. A model has
`--cut-off` seconds. `--page` writes the file's summary into docs/models.md. It needs the dependency
group `models`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, Progress

from benchmarks import markdown
from fused_norm.norms import NORMS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))
PATH = ROOT / "benchmarks" / "results" / "census.json"
PAGE = ROOT / "docs" / "models.md"
DEEP = "true depth"
LIBRARIES = ("transformers", "timm", "diffusers", "torchvision", "open_clip_torch")
# A gradient that is this far off is no rounding.
_WRONG = 1e-3
_COUNTS = ("norms", "read by Linear", "fused")


def zoos() -> dict[str, Any]:
    """Return all architectures by their names."""
    modules = {"zoo": "ZOO", "architectures": "ARCHITECTURES", "wider": "WIDER"}
    found: dict[str, Any] = {}
    for module, name in modules.items():
        found |= getattr(importlib.import_module(module), name)
    return found


def counts(sites: list[Any], graphs: int) -> dict[str, Any]:
    """Return how many norms there are, and what became of them.

    Args:
        sites: What became of each, among other calls.
        graphs: How many graphs there are of the model.
    """
    norms = [site for site in sites if site.kind in NORMS]
    read = [site for site in norms if site.linears]
    return {
        "graphs": graphs,
        "norms": len(norms),
        "read by Linear": len(read),
        "fused": sum(site.fused for site in read),
        "left": dict(Counter(site.reason for site in read if not site.fused)),
        "read otherwise": dict(Counter(site.reason for site in norms if not site.linears)),
    }


def count(name: str) -> dict[str, Any]:
    """Return what became of a model's norms, two layers deep, and how exact the results are.

    Args:
        name: Of an architecture.
    """
    found = importlib.import_module("compare").compare(name, zoo=zoos())
    return {
        **counts(found.sites, found.graphs),
        "output error": found.output_error,
        "gradient error": found.gradient_error,
    }


def count_deep(name: str) -> dict[str, Any]:
    """Return what became of a model's norms at its true depth.

    Args:
        name: Of an entry of zoo.py.
    """
    return counts(*importlib.import_module("compare").look(name, True))


def within(seconds: float, function: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what a function says of a model, computed in a process of its own.

    Args:
        seconds: How long it may take.
        function: One of the two above.
        name: Of an architecture.

    Raises:
        TimeoutError: If it takes longer.
        RuntimeError: If it fails; says why.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        warnings.simplefilter("ignore")
        try:
            theirs.send(function(name))
        except Exception as error:
            # The models are others', and so may be what they raise.
            theirs.send(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")

    process = context.Process(target=work)
    process.start()
    try:
        if not ours.poll(seconds):
            raise TimeoutError(f"longer than {seconds:.0f} s")
        said = ours.recv()
    except EOFError:
        raise RuntimeError("the process ended") from None
    finally:
        process.kill()
        process.join()
    if isinstance(said, str):
        raise RuntimeError(said)
    found: dict[str, Any] = said
    return found


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
        **{library: importlib.metadata.version(library) for library in LIBRARIES},
        "total": total(known),
        DEEP: total(deep),
        "models": models,
    }
    path.write_text(json.dumps(written, indent=1) + "\n")


def summary(written: dict[str, Any]) -> str:
    """Return what the file says, as Markdown.

    Args:
        written: What the file has.
    """
    rows = [row for row in written["models"] if "fused" in row]
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    versions = ", ".join(f"{name} {written[name]}" for name in LIBRARIES)
    every, deep = written["total"], written[DEEP]
    share = every["fused"] / every["read by Linear"]
    wrong = {row["model"] for row in rows if row["gradient error"] > _WRONG}
    outputs = max(row["output error"] for row in rows)
    gradients = max(row["gradient error"] for row in rows if row["model"] not in wrong)
    but = f"; wrong is a gradient of {', '.join(sorted(wrong))}" if wrong else ""
    lines = [
        f"{every['fused']:,} of {every['read by Linear']:,} norms that Linear layers read are "
        f"fused ({share:.1%}), in {every['models']} architectures, a few layers deep; at their "
        f"true depth {deep['fused']:,} of {deep['read by Linear']:,} in {deep['models']} of them. "
        f"The largest error of an output is {outputs:.0e} of its largest value, of a gradient "
        f"{gradients:.0e}{but}. With PyTorch {written['torch']}, {versions}.",
        "",
        "| family | architectures | norms | read by Linear | fused |",
        "|---|---|---|---|---|",
    ]
    for family, members in families.items():
        sums = total(members)
        lines.append(f"| {family} | {len(members)} | {' | '.join(str(sums[k]) for k in _COUNTS)} |")
    for key, title in (("left", "left"), ("read otherwise", "read by no Linear layer")):
        reasons: Counter[str] = Counter()
        for row in rows:
            # What reads them varies; the kind of reason does not.
            for reason, times in row.get(key, {}).items():
                reasons[reason.partition(":")[0]] += times
        lines += ["", f"| norms {title}, by reason | |", "|---|---|"]
        lines += [f"| {reason} | {times} |" for reason, times in reasons.most_common()]
    return "\n".join(lines)


def write_page(written: dict[str, Any]) -> None:
    """Put the summary into docs/models.md.

    Args:
        written: What the file has.
    """
    PAGE.write_text(markdown.filled(PAGE.read_text(), {"census": f"\n{summary(written)}\n\n"}))


def main(arguments: list[str] | None = None) -> int:
    """Count, print a line a model, write the file, and return 1 if one could not be counted.

    Args:
        arguments: Those of the command line.
    """
    zoo = zoos()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(zoo), help="some (default: all)")
    parser.add_argument("--depth", choices=["two", "true", "both"], default="both")
    parser.add_argument("--missing", action="store_true", help="count what the file lacks alone")
    parser.add_argument("--cut-off", type=float, default=300.0, help="seconds a model may take")
    parser.add_argument("--output", type=Path, default=PATH, help="file to write")
    parser.add_argument("--page", action="store_true", help="write the summary of the file alone")
    asked = parser.parse_args(arguments)
    if asked.page:
        write_page(json.loads(asked.output.read_text()))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    if asked.output.exists() and (asked.missing or len(asked.models) < len(zoo)):
        rows = {row["model"]: row for row in json.loads(asked.output.read_text())["models"]}
    # The processes below start as copies of this one, which has imported all that takes long.
    for library in ("transformers", "timm", "diffusers", "torchvision", "open_clip", "compare"):
        importlib.import_module(library)
    importlib.import_module("torch._dynamo")
    importlib.import_module("transformers.modeling_utils")
    shallow = set(zoo) - set(importlib.import_module("zoo").ZOO)
    failed: list[str] = []
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
        for name in progress.track(asked.models):
            row = {**rows.get(name, {}), "model": name, "family": zoo[name][0]}
            for key, depth, function in (("fused", "two", count), (DEEP, "true", count_deep)):
                other = {"two": "true", "true": "two"}[depth]
                if asked.depth == other or (asked.missing and key in row):
                    continue
                if depth == "true" and name in shallow:
                    continue
                start = time.perf_counter()
                try:
                    found = within(asked.cut_off, function, name)
                except (TimeoutError, RuntimeError) as error:
                    failed.append(name)
                    progress.print(f"{name} ({depth}): {error}")
                    continue
                row |= found if depth == "two" else {DEEP: found}
                rows[name] = row
                progress.print(
                    f"{name:30} {found['fused']:3} of {found['read by Linear']:3}  "
                    f"{time.perf_counter() - start:.0f} s  {found['left'] or ''}"
                )
                write(asked.output, rows, list(zoo))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
