"""Whether calls on Hopper take the fastest strategy: `poe bench --regret --device cuda`.

With `--training`, a forward with any of its strategies is followed by the backward that is chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fused_norm.chain.kernels import is_hopper
from fused_norm.devices.hopper import GpuCall
from fused_norm.tuning import gpu
from fused_norm.tuning.sizes import draw_for_gpu

DTYPES = ("bfloat16", "float16")
# What users get, and the strategies that it is held against: without keeping anything, and frozen.
CHOSEN = {
    "chosen": ("composed", "around", "anew", "eager"),
    "chosen frozen": ("kept", "composed", "around", "anew", "eager"),
}
# What a difference from run to run comes to: above it, a size is measured again, for longer.
AGAIN, LONGER = 1.05, 4


def measured(
    count: int, seed: int, seconds: float, dtypes: Sequence[str], **how: Any
) -> list[GpuCall]:
    """Return forwards of sizes drawn, with each strategy, as `gpu.measure` is told.

    Raises:
        RuntimeError: If there is no Hopper.
    """
    if not torch.cuda.is_available() or not is_hopper(torch.cuda.current_device()):
        raise RuntimeError("on a GPU there is nothing to choose, unless it is a Hopper")
    found = []
    with Progress(console=Console(stderr=True)) as progress:
        sizes = draw_for_gpu(count, seed, dtypes or DTYPES)
        for size in progress.track(sizes, description="sizes"):
            call = gpu.measure(size, seconds, CHOSEN, **how)
            if max(regret(call, name, False) for name in chosen(call)) > AGAIN:
                call = gpu.measure(size, LONGER * seconds, CHOSEN, **how)
            found.append(call)
    return found


def chosen(call: GpuCall) -> list[str]:
    """Return what users can get of a call: nothing is frozen where it is trained."""
    return [name for name in CHOSEN if name in call.graph]


def regret(call: GpuCall, name: str, is_launched: bool) -> float:
    """Return the time of what users get over that of the fastest strategy."""
    us = call.taken(is_launched)
    return us[name] / min(us[strategy] for strategy in CHOSEN[name] if strategy in us)


def of_eager(call: GpuCall, name: str, is_launched: bool) -> float:
    """Return the time of what users get over that of PyTorch's ops."""
    us = call.taken(is_launched)
    return us[name] / us["eager"]


def table(calls: Sequence[GpuCall]) -> Table:
    """Return what was found of each dtype, with the worst size."""
    found = Table(title="Time of what users get, over that of the fastest strategy and of eager")
    for name in ("dtype", "", "sizes", "regret: median", "worst", "at M,K,N"):
        found.add_column(name, justify="left" if name in ("dtype", "") else "right")
    for name in ("of eager: median", "worst", "at M,K,N"):
        found.add_column(name, justify="right")
    for dtype in dict.fromkeys(call.dtype for call in calls):
        each = [call for call in calls if call.dtype == dtype]
        for is_launched in (False, True):
            for name in chosen(each[0]):
                cells = list[str]()
                for ratio in (regret, of_eager):
                    ratios = {ratio(call, name, is_launched): call for call in each}
                    worst = ratios[max(ratios)]
                    cells += [f"{statistics.median(ratios):.3f}", f"{max(ratios):.2f}"]
                    cells.append(f"{worst.M},{worst.K},{worst.N}")
                what = "launched" if is_launched else "graph"
                what += ", frozen" if name == "chosen frozen" else ""
                found.add_row(dtype, what, str(len(each)), *cells)
    return found


def plot(calls: Sequence[GpuCall], path: Path) -> None:
    """Write regret and the ratio to eager over the products of a call, in graphs and launched."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    shared: Any = {"sharey": True}
    for axes, is_launched in zip(figure.subplots(1, 2, **shared), (False, True), strict=True):
        for dtype, color in zip(DTYPES, ("#2e86ab", "#3a9d6e"), strict=True):
            each = [c for c in calls if c.dtype == dtype]
            work = [c.M * c.K * c.N for c in each]
            for ratio, mark in ((regret, "o"), (of_eager, "x")):
                ratios = [ratio(c, "chosen", is_launched) for c in each]
                label = dtype if ratio is regret else None
                axes.plot(work, ratios, mark, color=color, ms=4, alpha=0.7, label=label)
        axes.axhline(1, color="#8a8a8a", lw=0.8)
        title = "launched" if is_launched else "in a CUDA graph"
        axes.set(xscale="log", xlabel="M K N", title=title)
    figure.axes[0].set_ylabel("dots: over the fastest strategy; crosses: over eager")
    named, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(named, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path)
