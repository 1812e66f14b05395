"""Holds the backend of torch.compile to PyTorch's own rule for backends, on sixty architectures.

Every model of tests/models/architectures.py runs in inference and for two steps of training, in
float32 on a CPU: compiled by `aot_eager`, which changes nothing, by `fused_norm`, and for some by
`fused_norm` with Inductor after it. What `aot_eager` passes must pass. `python
scripts/measure/architectures.py` writes benchmarks/results/architectures.json after each model;
those that are named are run again, and others stay. `--table` prints the result for a page. It
needs the dependency group `models`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.metadata
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from fused_norm.models import backend

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))
PATH = ROOT / "benchmarks" / "results" / "architectures.json"
LIBRARIES = ("transformers", "timm", "torchvision")
MODES = ("inference", "training")
# Inductor's C++ compiler takes a minute for some of the others.
WITH_INDUCTOR = (
    *("XLNet", "MPNet", "Pegasus", "MT5", "BioGPT", "OLMoE", "Cohere2", "AST", "BLIP"),
    *("PatchTST", "PiT", "torchvision Swin V2"),
)


def row(name: str) -> dict[str, Any]:
    """Return what became of a model, by backend and mode.

    Args:
        name: Of an architecture.
    """
    suite = importlib.import_module("suite")
    zoo = importlib.import_module("architectures").ARCHITECTURES
    found: dict[str, Any] = {"model": name, "library": zoo[name][0]}
    for mode in MODES:
        trial = suite.Trial(name, zoo, mode == "training")
        found["class"] = type(trial.model).__name__
        sites: list[Any] = []
        ours = functools.partial(backend, sites=sites)
        found[mode] = {
            "aot_eager": trial.judge(functools.partial(torch.compile, backend="aot_eager")),
            "fused_norm": trial.judge(
                functools.partial(torch.compile, backend=ours, options={"then": "eager"})
            ),
        }
        found[mode]["fused"] = sum(site.fused for site in sites)
        found[mode]["read by Linear"] = sum(bool(site.linears) for site in sites)
        if name in WITH_INDUCTOR:
            # Small calls too, which are not fused before Inductor where PyTorch is faster;
            # and with PyTorch's own random numbers, which models draw that leave values out.
            options = {"small": True, "fallback_random": True}
            found[mode]["fused_norm, Inductor"] = trial.judge(
                functools.partial(torch.compile, backend="fused_norm", options=options)
            )
        del trial
        gc.collect()
    return found


def write(path: Path, rows: dict[str, dict[str, Any]], order: list[str]) -> None:
    """Write the file.

    Args:
        path: Where to.
        rows: By the names of models.
        order: All names.
    """
    written = {
        "torch": torch.__version__,
        **{library: importlib.metadata.version(library) for library in LIBRARIES},
        "models": [rows[name] for name in order if name in rows],
    }
    path.write_text(json.dumps(written, indent=1) + "\n")


def table(written: dict[str, Any]) -> str:
    """Return the result as a table of Markdown: how many of each library pass, by backend.

    Args:
        written: What the file has.
    """
    lines = [
        "| library | architectures | norms fused | `aot_eager` | `fused_norm` | with Inductor |",
        "|---|---|---|---|---|---|",
    ]
    for library in LIBRARIES:
        models = [each for each in written["models"] if each["library"] == library]
        fused = sum(each["training"]["fused"] for each in models)
        read = sum(each["training"]["read by Linear"] for each in models)
        cells = []
        for name in ("aot_eager", "fused_norm", "fused_norm, Inductor"):
            tried = [each[mode][name] for each in models for mode in MODES if name in each[mode]]
            cells.append(f"{tried.count('pass')} of {len(tried)}")
        version = written[library]
        lines.append(
            f"| {library} {version} | {len(models)} | {fused} of {read} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run, print a line a model, write the file, and return 1 if one fails that should pass.

    Args:
        arguments: Those of the command line.
    """
    zoo = importlib.import_module("architectures").ARCHITECTURES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(zoo), help="some (default: all)")
    parser.add_argument("--output", type=Path, default=PATH, help="file to write")
    parser.add_argument("--table", action="store_true", help="print what the file says")
    asked = parser.parse_args(arguments)
    if asked.table:
        print(table(json.loads(asked.output.read_text())))
        return 0
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, Any]] = {}
    if asked.output.exists() and len(asked.models) < len(zoo):
        rows = {each["model"]: each for each in json.loads(asked.output.read_text())["models"]}
    failed = False
    for name in asked.models:
        start = time.perf_counter()
        rows[name] = row(name)
        write(asked.output, rows, list(zoo))
        said = [
            f"{mode} {key}: {what}"
            for mode in MODES
            for key, what in rows[name][mode].items()
            if isinstance(what, str) and what != "pass"
        ]
        failed |= any("fused_norm" in each for each in said)
        counts = "{fused} of {read by Linear}".format_map(rows[name]["training"])
        took = time.perf_counter() - start
        print(f"{name:22} {counts:9} {took:5.0f} s  {'; '.join(said) or 'pass'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
