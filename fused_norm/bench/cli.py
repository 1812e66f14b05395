"""The command line of the benchmark: `python -m fused_norm bench`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from fused_norm.bench import baseline, blocks, providers, report, results, roster, shapes
from fused_norm.bench import before as before_change
from fused_norm.bench.case import MODE_DESCRIPTIONS, MODES, Case
from fused_norm.bench.ops import OPS
from fused_norm.bench.plan import Listener, Plan
from fused_norm.bench.results import Measurement, Run
from fused_norm.bench.runner import Runner
from fused_norm.bench.timing import Budget

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES["float64"] = torch.float64
DEFAULT_SETS = {
    ("layernorm_linear", "cpu"): ("puzzle", "small", "gpt2", "vit", "decode", "odd"),
    ("layernorm_linear", "cuda"): ("puzzle", "small", "gpt2", "llama", "vit", "decode", "odd"),
    ("layer_norm", "cpu"): ("rows", "odd"),
    ("layer_norm", "cuda"): ("rows", "odd"),
}
# Of the ops that have none of their own above.
SETS = {"cpu": ("small",), "cuda": ("named",)}
QUICK_OPS = ("layernorm_linear", "layer_norm")
QUICK_SHAPES = {
    "layernorm_linear": ((16, 8, 16), (512, 1024, 1024)),
    "layer_norm": ((2048, 1024, 1),),
}
# On a CPU: PyTorch's default first, as the limit leaves out what comes last.
QUICK_DTYPES = ("float32", "bfloat16")
# What --quick leaves out: torch.compile spends its minute on compiling.
SLOW = ("compile", "compile-max-autotune", "max-fused", "max-unfused")
# Leaves a busy machine the rest of the minute for the case that has begun, and for plots.
QUICK_LIMIT = 25.0
# At its power limit, a GPU takes 3 % more or less for one call than for the next.
FEWEST_ROUNDS_ON_GPU = 15
INTERRUPTED = 130
MOST_PROBLEMS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        0 if all that is ours was right, and within `--max-ratio`; 1 if not; 2 for a wrong command
        line; 130 after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.schema:
        print(json.dumps(results.schema(), indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        _list(console)
        return 0
    try:
        if options.before:
            before_change.add(options.before)
        plan = _plan(options)
        before = results.load(options.baseline) if options.baseline else None
        _assert_writable(options)
        if options.threads:
            torch.set_num_threads(options.threads)
        torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
        progress = _Progress(plan.steps, options.json)
        runner = Runner(plan, progress)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    interrupted = False
    with progress:
        try:
            runner.execute()
        except KeyboardInterrupt:
            interrupted = True
    run = runner.run
    report.show(run, console)
    if interrupted:
        made = f"{len(run.measurements)} of {plan.steps} measurements were made"
        console.print(f"\nInterrupted: {made}.", highlight=False)
    elif not run.finished:
        console.print("\nThe time limit left measurements out.", highlight=False)
    if before is not None:
        baseline.show(before, run, console)
    _write(run, options, console)
    status = _verdict(run, options.max_ratio, console)
    return INTERRUPTED if interrupted else status


def _parser() -> argparse.ArgumentParser:
    modes = "; ".join(f"{mode}: {MODE_DESCRIPTIONS[mode]}" for mode in MODES)
    parser = argparse.ArgumentParser(
        prog="python -m fused_norm bench",
        description="Measure the ops against what PyTorch users have today.",
    )
    what = parser.add_argument_group("what")
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
    how = parser.add_argument_group("how")
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
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="results, kept up to date")
    out.add_argument(
        "--resume",
        action="store_true",
        help="keep the results in --json and measure only what they lack",
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
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the benchmark runs on cpu and cuda, not on {device}")
    asked = list(blocks.SHAPES) if options.blocks else options.block or []
    asked = [*(options.op or ()), *asked]
    # Which way runs on a CPU differs by dtype, so that none of them speaks for the others.
    dtypes: tuple[str, ...] = (
        ("bfloat16",) if device.type == "cuda" else ("bfloat16", "float16", "float32")
    )
    if options.quick and device.type == "cpu":
        dtypes = QUICK_DTYPES
    cases = [
        Case(blocks.EVERY[op], shape, DTYPES[dtype], device)
        for op in asked or (QUICK_OPS if options.quick else OPS)
        for dtype in options.dtype or dtypes
        for shape in _shapes(op, device, options)
    ]
    for case in cases:
        case.op.inputs(case.shape)
    names = options.provider
    if names is not None and options.before:
        names = [*names, before_change.NAME]
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
    return results.load(options.json) if options.json.exists() else None


def _assert_writable(options: argparse.Namespace) -> None:
    """Raise now what would be raised after all has been measured."""
    for path in (options.json, options.csv):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise ValueError(f"{path} is a folder")
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'fused-norm[plots]'")


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
    # Shapes that differ in a size the op does not have are one.
    distinct = {tuple(s) if blocks.EVERY[op].has_outputs else s[:2]: s for s in reversed(found)}
    return list(reversed(distinct.values()))


def _list(console: Console) -> None:
    for op in blocks.EVERY.values():
        console.print(f"[bold]{op.name}[/bold]: {op.title}")
        for provider in providers.of_op(op.name):
            _, problem = roster.load(provider)
            state = problem or provider.versions()
            console.print(
                f"  {provider.name:<22} {provider.description} ({state})", highlight=False
            )
    for name, members in shapes.SETS.items():
        console.print(f"[bold]{name}[/bold]: {', '.join(map(str, members))}", highlight=False)


def _write(run: Run, options: argparse.Namespace, console: Console) -> None:
    written = []
    if options.json:
        results.save(run, options.json)
        written.append(options.json)
    if options.csv:
        report.write_csv(run, options.csv)
        written.append(options.csv)
    if options.plot:
        from fused_norm.bench import plots

        written += plots.write(run, options.plot)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _verdict(run: Run, max_ratio: float | None, console: Console) -> int:
    """Print what is wrong with ours, and return the exit status."""
    problems = []
    for measurement in run.measurements:
        where = f"{measurement.op} {measurement.mode} {measurement.dtype}"
        where += f" {'x'.join(map(str, measurement.shape))}"
        for result in measurement.results:
            if run.role(measurement.op, result.provider) != "ours":
                continue
            name = f"{result.provider}, {where}"
            if result.status in ("wrong", "failed"):
                problems.append(f"{name}: {result.status}: {result.message}")
            for metric, ratio in result.vs_eager.items():
                if max_ratio is not None and ratio > max_ratio:
                    problems.append(f"{name}: {metric} is {ratio:.2f} of eager's, over {max_ratio}")
    for problem in problems[:MOST_PROBLEMS]:
        console.print(problem, style="red", highlight=False, markup=False)
    if len(problems) > MOST_PROBLEMS:
        console.print(f"and {len(problems) - MOST_PROBLEMS} more", style="red")
    return 1 if problems else 0


class _Progress(Listener):
    """Shows progress: a live bar on a terminal, a line for each measurement elsewhere."""

    def __init__(self, steps: int, json_file: Path | None) -> None:
        self._console = Console(stderr=True)
        self._json_file = json_file
        self._done, self._steps = 0, steps
        self._began = time.perf_counter()
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def doing(self, text: str) -> None:
        """Show what is being done."""
        self._bar.update(self._task, description=text)

    def did(self, run: Run, measurement: Measurement) -> None:
        """Show a measurement, and keep it on disk."""
        self._done += 1
        self._bar.advance(self._task)
        seconds = time.perf_counter() - self._began
        text = f"[{self._done}/{self._steps} {seconds:.0f} s] {report.line(run, measurement)}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        if self._json_file:
            results.save(run, self._json_file)

    def skipped(self, count: int) -> None:
        """Count measurements that will not be made."""
        self._done += count
        self._bar.advance(self._task, count)
