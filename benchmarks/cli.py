"""The benchmark as a command: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from benchmarks import baseline, blocks, command_line, providers, report, roster, runs, shapes
from benchmarks import before as before_change
from benchmarks.plan import Listener
from benchmarks.runner import Runner
from benchmarks.runs import Measurement, Run

INTERRUPTED = 130
MOST_PROBLEMS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        0 if all that is ours was right, and within `--max-ratio`; 1 if not; 2 for a wrong command
        line; 130 after Ctrl-C.
    """
    parser = command_line.parser()
    options = parser.parse_args(arguments)
    if options.schema:
        print(json.dumps(runs.schema(), indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        _list(console)
        return 0
    try:
        if options.before:
            before_change.add(options.before)
        plan = command_line.plan_of(options)
        before = runs.load(options.baseline) if options.baseline else None
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


def _assert_writable(options: argparse.Namespace) -> None:
    """Raise now what would otherwise be raised after everything has been measured."""
    for path in (options.json, options.csv):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise ValueError(f"{path} is a folder")
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'fused-norm[plots]'")


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
        runs.save(run, options.json)
        written.append(options.json)
    if options.csv:
        report.write_csv(run, options.csv)
        written.append(options.csv)
    if options.plot:
        from benchmarks import plots

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
            runs.save(run, self._json_file)

    def skipped(self, count: int) -> None:
        """Count measurements that will not be made."""
        self._done += count
        self._bar.advance(self._task, count)
