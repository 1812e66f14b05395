"""Measures calls with each strategy on this machine, so that later calls use the fastest.

Nothing is measured unless you ask.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from fused_norm.chain import kernels, library
from fused_norm.devices import choice, costs, hopper_fit
from fused_norm.devices.costs import DIRECTIONS, Device, Measured
from fused_norm.devices.hopper import GpuCall, Hopper
from fused_norm.devices.machine import cpu_kind, hopper_kind
from fused_norm.native import build, cache
from fused_norm.tuning import gpu
from fused_norm.tuning.cpu import measure
from fused_norm.tuning.sizes import DTYPES, SEED, Size, calls_of, draw, draw_for_gpu


def tune(
    model: torch.nn.Module | None = None,
    *example: Any,
    seconds: float = 120.0,
    sizes: Sequence[tuple[int, int, int]] = (),
    device: str = "cpu",
) -> Path:
    """Measure this machine, so that later calls and processes use the fastest strategy on it.

    Args:
        model: A model whose calls are measured as well.
        example: The model's arguments.
        seconds: How long to measure. Random sizes take the time that the given ones leave.
        sizes: (M, K, N) to measure as well, in every dtype.
        device: `"cpu"`, or `"cuda"` for the current GPU, which has to be a Hopper GPU: on others,
            products are PyTorch's.

    Returns:
        The file with the result, in the cache folder.

    Raises:
        ValueError: If the device or the seconds are none that can be measured.
        RuntimeError: If there are no kernels to measure, nothing was measured, or the cache cannot
            be written.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got {device!r}')
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be finite and not negative, got {seconds}")
    is_gpu = device == "cuda"
    if is_gpu and not (
        torch.cuda.is_available() and kernels.is_hopper(torch.cuda.current_device())
    ):
        raise RuntimeError("on a GPU there is nothing to choose, unless it is a Hopper")
    wanted = [Size(dtype, "", *each) for each in sizes for dtype in DTYPES]
    if model is not None:
        wanted += calls_of(model, example, device)
    wanted = list(dict.fromkeys(wanted))
    found = _of_gpu(wanted, seconds) if is_gpu else _of_cpu(wanted, seconds)
    path = choice.tuned_path(found.name)
    cache.check()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    costs.save(found, path)
    choice.forget()
    if (chain := library.load()) is not None:
        kernels.tell(chain)
    return path


def _of_cpu(wanted: list[Size], seconds: float) -> Device:
    for dtype in DTYPES:
        build.check_at_hand(torch.device("cpu"), DTYPES[dtype])
    each = 0.15

    def both(size: Size) -> list[Measured]:
        longer = 2 * each if size in wanted else each
        return [measure(size, direction, longer) for direction in DIRECTIONS]

    found = _within(seconds, wanted, draw(10_000, SEED), both)
    about = _about(len(found)) | {"threads": torch.get_num_threads()}
    return costs.fit(cpu_kind() or "cpu", about, found)


def _current() -> int:
    return torch.cuda.current_device()


def _of_gpu(wanted: list[Size], seconds: float) -> Hopper:
    device = _current()

    def all_strategies(size: Size) -> list[GpuCall]:
        # A gate's product is a product with as many outputs.
        return [gpu.measure(size, 0.04)]

    found = _within(seconds, wanted, draw_for_gpu(10_000, SEED), all_strategies)
    about = _about(len(found)) | {"gpu": torch.cuda.get_device_name(device)}
    return hopper_fit.fit(hopper_kind(device), about, found, gpu.model_terms(device))


Call = TypeVar("Call")


def _within(
    seconds: float, wanted: list[Size], drawn: Sequence[Size], call: Callable[[Size], list[Call]]
) -> list[Call]:
    """Return measurements of the wanted sizes, and of as many random ones as there is time for."""
    began, found = time.perf_counter(), list[Call]()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=seconds)
        for i, size in enumerate(itertools.chain(wanted, drawn)):
            passed = time.perf_counter() - began
            if passed > seconds and i >= len(wanted):
                break
            found += call(size)
            progress.update(task, completed=min(time.perf_counter() - began, seconds))
    if not found:
        raise RuntimeError(f"nothing was measured in {seconds:g} s: give sizes, or more seconds")
    return found


def _about(calls: int) -> dict[str, Any]:
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {"measured": now, "torch": torch.__version__, "calls": calls}
