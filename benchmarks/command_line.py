"""What the benchmark's command line may ask for, and the plan that it makes of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import before, blocks, providers, runs, shapes
from benchmarks.case import MODE_DESCRIPTIONS, MODES, Case
from benchmarks.ops import OPS
from benchmarks.plan import Plan
from benchmarks.runs import Run
from benchmarks.timing import Budget

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES["float64"] = torch.float64
DEFAULT_SETS = {
    ("layernorm_linear", "cpu"): ("puzzle", "small", "gpt2", "vit", "decode", "odd"),
    ("layernorm_linear", "cuda"): ("puzzle", "small", "gpt2", "llama", "vit", "decode", "odd"),
    ("layer_norm", "cpu"): ("rows", "odd"),
    ("layer_norm", "cuda"): ("rows", "odd"),
}
# For ops that have no sets of their own above.
SETS = {"cpu": ("small",), "cuda": ("named",)}
QUICK_OPS = ("layernorm_linear", "layer_norm")
QUICK_SHAPES = {
    "layernorm_linear": ((16, 8, 16), (512, 1024, 1024)),
    "layer_norm": ((2048, 1024, 1),),
}
# For `--quick` on a CPU.
QUICK_DTYPES = ("float32", "bfloat16")
# What --quick leaves out: torch.compile spends its minute on compiling.
SLOW = ("compile", "compile-max-autotune", "max-fused", "max-unfused")
# Leaves a busy machine the rest of the minute for the case that has begun, and for plots.
QUICK_LIMIT = 25.0
# At its power limit, a GPU takes 3 % more or less for one call than for the next.
FEWEST_ROUNDS_ON_GPU = 15


def parser() -> argparse.ArgumentParser:
    """Return what reads a command line."""
    modes = "; ".join(f"{mode}: {MODE_DESCRIPTIONS[mode]}" for mode in MODES)
    found = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the ops against what PyTorch users have today.",
    )
    what = found.add_argument_group("what")
    what.add_argument(
        "--op",
        action="append",
        choices=list(OPS),
        help=f"default: all; --quick: {' '.join(QUICK_OPS)}",
    )
    what.add_argument("--blocks", action="store_true", help="whole blocks of transformers instead")
    what.add_argument(
        "--block", action="append", choices=list(blocks.SHAPES), help="may be repeated"
    )
    what.add_argument("--mode", action="append", choices=MODES, help=f"{modes}")
    what.add_argument(
        "--shapes",
        action="append",
        choices=list(shapes.SETS),
        help="a named set, may be repeated (default: those that suit the device)",
    )
    what.add_argument("--shape", action="append", metavar="M,K,N", help="may be repeated")
    what.add_argument(
        "--provider",
        action="append",
        choices=providers.NAMES,
        help="may be repeated; eager is always measured (default: all that are installed)",
    )
    what.add_argument("--dtype", action="append", choices=list(DTYPES), help="may be repeated")
    what.add_argument("--device", default=None, help="cpu or cuda (default: cuda if there is one)")
    what.add_argument(
        "--interference",
        action="store_true",
        help="also measure how much our calls slow the PyTorch ops between them (CPU)",
    )
    what.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="also measure the package of another checkout, as provider 'before'",
    )
    what.add_argument("--list", action="store_true", help="list ops, providers and shapes")
    how = found.add_argument_group("how")
    how.add_argument(
        "--quick", action="store_true", help="a few shapes and dtypes: under a minute on 2 cores"
    )
    how.add_argument("--seconds", type=float, help="time for each provider in each measurement")
    how.add_argument("--time-limit", type=float, metavar="S", help="start no case after S seconds")
    how.add_argument("--threads", type=int, help="CPU threads")
    how.add_argument("--tf32", action="store_true", help="allow TF32 in float32 products")
    how.add_argument(
        "--warm", action="store_true", help="one set of inputs, which stays in the cache"
    )
    how.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    how.add_argument("--seed", type=int, default=0)
    out = found.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="results, kept up to date")
    out.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in --json, measuring what it lacks",
    )
    out.add_argument("--csv", type=Path, metavar="FILE")
    out.add_argument("--plot", type=Path, metavar="DIR", help="PNG plots (needs matplotlib)")
    out.add_argument(
        "--baseline", type=Path, metavar="FILE", help="an earlier --json: print what changed"
    )
    out.add_argument(
        "--max-ratio", type=float, metavar="R", help="exit 1 if ours exceeds R times eager anywhere"
    )
    out.add_argument("--commit", help="git commit to record, if there is no checkout to ask")
    out.add_argument("--schema", action="store_true", help="print the JSON's schema")
    return found


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan of a run.

    Args:
        options: As `parser` reads them.

    Raises:
        ValueError: If they ask for what cannot be measured here.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the benchmark runs on cpu and cuda, not on {device}")
    asked = list(blocks.SHAPES) if options.blocks else options.block or []
    asked = [*(options.op or ()), *asked]
    # Which strategy runs on a CPU depends on the dtype, so all of them are measured.
    dtypes: tuple[str, ...] = (
        ("bfloat16",) if device.type == "cuda" else ("bfloat16", "float16", "float32")
    )
    if options.quick and device.type == "cpu":
        dtypes = QUICK_DTYPES
    cases = [
        Case(blocks.EVERY[op], shape, DTYPES[dtype], device)
        for op in asked or (QUICK_OPS if options.quick else OPS)
        for shape in _shapes(op, device, options)
        # Each dtype at one shape before any at the next: what a time limit leaves out is large.
        for dtype in options.dtype or dtypes
    ]
    for case in cases:
        case.op.inputs(case.shape)
    names = options.provider
    if names is not None and options.before:
        names = [*names, before.NAME]
    if names is None and options.quick:
        names = [name for name in providers.NAMES if name not in SLOW]
    quick = Budget(seconds=0.2, warm_up=0.05, most=100)
    budget = quick if options.quick else Budget()
    if options.seconds is not None:
        warm_up = min(budget.warm_up, options.seconds)
        budget = replace(budget, seconds=options.seconds, warm_up=warm_up)
    if device.type == "cuda" and not options.quick:
        budget = replace(budget, fewest=FEWEST_ROUNDS_ON_GPU)
    return Plan(
        cases=cases,
        modes=options.mode
        or (("forward", "train") if options.quick else ("forward", "backward", "train")),
        device=device,
        names=names,
        budget=budget,
        seed=options.seed,
        is_warm=options.warm,
        interference=options.interference,
        measures_memory=not options.no_memory,
        time_limit=options.time_limit or (QUICK_LIMIT if options.quick else float("inf")),
        commit=options.commit,
        earlier=_earlier(options),
    )


def _earlier(options: argparse.Namespace) -> Run | None:
    if not options.resume:
        return None
    if not options.json:
        raise ValueError("--resume goes on with the results of --json")
    return runs.load(options.json) if options.json.exists() else None


def _shapes(op: str, device: torch.device, options: argparse.Namespace) -> list[shapes.Shape]:
    found = [shapes.parse(text) for text in options.shape or ()]
    named = options.shapes
    if not found and not named:
        if options.quick:
            sizes = QUICK_SHAPES.get(op, QUICK_SHAPES["layernorm_linear"])
            found = [shapes.Shape(*three) for three in sizes]
        else:
            if op in blocks.SHAPES:
                return [blocks.SHAPES[op]]
            named = DEFAULT_SETS.get((op, device.type), SETS[device.type])
    found += [shape for name in named or () for shape in shapes.SETS[name]]
    # Shapes that differ only in a size the op does not have are the same.
    distinct = {tuple(s) if blocks.EVERY[op].has_outputs else s[:2]: s for s in reversed(found)}
    return list(reversed(distinct.values()))
