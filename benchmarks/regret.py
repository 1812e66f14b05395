"""Whether calls take the fastest strategy at sizes that nobody has chosen.

    poe bench --regret [--device cuda [--training] [--normalization rms_norm]] [--seed N]

Sizes are drawn by a seed. Of each, on a CPU, the strategies (our product, our passes around
PyTorch's, and PyTorch's ops alone) and what users get are interleaved; `regret` is the time of what
they get over that of the fastest strategy, `of eager` over that of PyTorch's ops.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import document, regret_gpu
from benchmarks.environment import describe
from fused_norm.devices import choice
from fused_norm.devices.costs import DIRECTIONS, Measured
from fused_norm.devices.hopper import GpuCall
from fused_norm.devices.machine import cpu_kind, hopper_kind
from fused_norm.tuning import cpu, sizes

# Another than what `tune` and the shipped measurements were drawn by.
SEED = 2026
COUNT = 60
# What a difference from run to run comes to: above it, a size is measured again, for longer. Calls
# whose memory the system has to clear first take up to six times as long as others.
AGAIN, LONGER, FEWEST = 1.05, 4, 9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and return an exit status."""
    parser = argparse.ArgumentParser(prog="poe bench --regret", description=__doc__)
    parser.add_argument("--regret", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--training", action="store_true", help="with a backward, on a GPU")
    norms = ("layer_norm", "rms_norm")
    parser.add_argument("--normalization", choices=norms, default=norms[0], help="on a GPU")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--from-json", type=Path, help="show a file's results instead of measuring")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the sizes (default: {SEED})")
    parser.add_argument("--count", type=int, default=COUNT, help=f"of sizes (default: {COUNT})")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each (default: 0.5)")
    parser.add_argument("--dtype", action="append", choices=list(sizes.DTYPES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    if options.from_json:
        shown_again = json.loads(options.from_json.read_text())
        is_gpu = shown_again["environment"]["device"] == "cuda"
        rows = shown_again["calls"]
    else:
        is_gpu = options.device == "cuda"
        rows = None
    calls: list[Any]
    record, shown = (GpuCall, regret_gpu) if is_gpu else (Measured, sys.modules[__name__])
    if rows is not None:
        calls = [record(*row) for row in rows]
    elif is_gpu:
        seconds, dtypes = options.seconds / 10, options.dtype
        drawn = (options.count, options.seed, seconds, dtypes)
        how = {"trains": options.training, "normalization": options.normalization}
        calls = regret_gpu.measured(*drawn, **how)
    else:
        calls = list(measured(options))
    Console().print(shown.table(calls), soft_wrap=True)
    if options.json:
        kind = hopper_kind(torch.cuda.current_device()) if is_gpu else cpu_kind()
        content = {
            "environment": dataclasses.asdict(
                describe(torch.device(options.device), options.commit)
            ),
            "seed": options.seed,
            "normalization": options.normalization,
            "chosen_by": str(_chosen_by(kind)),
            "fields": record._fields,
        }
        document.write_rows(options.json, content, "calls", calls)
    if options.plot:
        shown.plot(calls, options.plot)
    return 0


def _chosen_by(kind: str | None) -> str | None:
    """Return the measurements in use: a shipped file's name, or that the machine was tuned."""
    path = choice.path(kind)
    return None if path is None else path.name if path.parent == choice.SHIPPED else "tune"


def measured(options: argparse.Namespace) -> list[Measured]:
    """Return the calls, with each strategy."""
    wanted = sizes.draw(options.count, options.seed, options.dtype or tuple(sizes.DTYPES))
    found = []
    with Progress(console=Console(stderr=True)) as progress:
        for size in progress.track(wanted, description="sizes"):
            for direction in DIRECTIONS:
                call = cpu.measure(size, direction, options.seconds, ["chosen"])
                if max(regret(call), of_eager(call)) > AGAIN:
                    seconds = LONGER * options.seconds
                    call = cpu.measure(size, direction, seconds, ["chosen"], FEWEST)
                found.append(call)
    return found


def regret(call: Measured) -> float:
    """Return the time of what users get over that of the fastest strategy."""
    return call.us["chosen"] / min(us for name, us in call.us.items() if name != "chosen")


def of_eager(call: Measured) -> float:
    """Return the time of what users get over that of PyTorch's ops."""
    return call.us["chosen"] / call.us["eager"]


def table(calls: Sequence[Measured]) -> Table:
    """Return what was found of each dtype and direction, with the worst size."""
    found = Table(title="Time of what users get, over that of the fastest strategy and of eager")
    for name in ("dtype", "direction", "sizes", "regret: median", "worst", "at M,K,N"):
        found.add_column(name, justify="left" if name in ("dtype", "direction") else "right")
    for name in ("of eager: median", "worst", "at M,K,N"):
        found.add_column(name, justify="right")
    groups: dict[tuple[str, str], list[Measured]] = {}
    for call in calls:
        groups.setdefault((call.dtype, call.direction), []).append(call)
    for (dtype, direction), each in groups.items():
        cells: list[str] = []
        for ratio in (regret, of_eager):
            worst = max(each, key=ratio)
            cells += [f"{statistics.median(map(ratio, each)):.3f}", f"{ratio(worst):.2f}"]
            cells.append(f"{worst.M},{worst.K},{worst.N} {worst.kind}")
        found.add_row(dtype, direction, str(len(each)), *cells)
    return found


def plot(calls: Sequence[Measured], path: Path) -> None:
    """Write regret and the ratio to eager over the products of a call."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    shared: Any = {"sharey": True}
    for axes, direction in zip(figure.subplots(1, 2, **shared), DIRECTIONS, strict=True):
        for dtype, color in zip(sizes.DTYPES, ("#d1495b", "#2e86ab", "#3a9d6e"), strict=True):
            each = [c for c in calls if c.dtype == dtype and c.direction == direction]
            work = [c.M * c.K * c.N for c in each]
            axes.plot(work, [regret(c) for c in each], "o", color=color, ms=4, label=dtype)
            axes.plot(work, [of_eager(c) for c in each], "x", color=color, ms=4, alpha=0.6)
        axes.axhline(1, color="#8a8a8a", lw=0.8)
        axes.set(xscale="log", xlabel="M K N", title=direction)
    figure.axes[0].set_ylabel("dots: over the fastest strategy; crosses: over eager")
    named, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(named, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
