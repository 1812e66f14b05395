"""Measures this machine's calls each way, and keeps what later calls are chosen by.

Nothing is measured unless somebody asks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from fused_norm.chain import kernels, library
from fused_norm.devices import choice, costs
from fused_norm.devices.costs import DIRECTIONS, Device, Measured
from fused_norm.devices.machine import cpu_kind
from fused_norm.native import build, cache
from fused_norm.tuning.cpu import measure
from fused_norm.tuning.sizes import DTYPES, SEED, Size, calls_of, draw


def tune(
    model: torch.nn.Module | None = None,
    *example: Any,
    seconds: float = 120.0,
    sizes: Sequence[tuple[int, int, int]] = (),
) -> Path:
    """Measure this machine and keep the result, which later calls and processes are chosen by.

    Only calls on a CPU are measured: a GPU's go by what was measured on its kind.

    Args:
        model: Its calls are measured as well; none for those of models in general.
        example: The model's arguments.
        seconds: To take. Sizes drawn take what is left of it by those given.
        sizes: (M, K, N) to be measured as well, in every dtype.

    Returns:
        The file, in the cache of what is built.

    Raises:
        RuntimeError: If there are no kernels to measure, or the cache cannot be written.
    """
    wanted = [Size(dtype, "", *each) for each in sizes for dtype in DTYPES]
    if model is not None:
        wanted += calls_of(model, example)
    device = _measured(list(dict.fromkeys(wanted)), seconds)
    path = choice.tuned_path(cpu_kind())
    cache.check()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    device.save(path)
    choice.forget()
    if (chain := library.load()) is not None:
        kernels.tell(chain)
    return path


def _measured(wanted: list[Size], seconds: float) -> Device:
    """Return a device by sizes wanted and others, within some seconds."""
    began, found = time.perf_counter(), list[Measured]()
    for dtype in DTYPES:
        build.check_at_hand(torch.device("cpu"), DTYPES[dtype])
    # As many as there is time for.
    drawn = iter(draw(10_000, SEED))
    each = 0.15
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=seconds)
        for size in itertools.chain(wanted, drawn):
            passed = time.perf_counter() - began
            if passed > seconds and len(found) >= 2 * len(wanted):
                break
            for direction in DIRECTIONS:
                found.append(measure(size, direction, 2 * each if size in wanted else each))
            progress.update(task, completed=min(time.perf_counter() - began, seconds))
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    about = {"measured": now, "torch": torch.__version__, "threads": torch.get_num_threads()}
    about["calls"] = len(found)
    return costs.fit(cpu_kind() or "cpu", about, found)
