"""How much memory a call holds at most, and whether a case fits at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.case import Case, Mode


class DoesNotFitError(RuntimeError):
    """A case needs more memory than is free."""


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be taken on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + held
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kibibytes) * 1024


def require(case: Case, providers: int) -> None:
    """Raise unless a case fits: Linux grants memory that it does not have, then kills.

    Args:
        case: The case.
        providers: How many outputs and saved tensors are held at a time.

    Raises:
        DoesNotFitError: If it would not.
    """
    # In float64 the inputs, their gradients and what the reference saves.
    exact = 4 * case.op.held(case.shape, 8)
    needed = exact + (2 + providers) * case.op.held(case.shape, case.dtype.itemsize)
    free = free_bytes(case.device)
    if needed > 0.9 * free:
        raise DoesNotFitError(
            f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out."""
    if isinstance(error, (DoesNotFitError, MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return "can't allocate memory" in text or "not enough memory" in text


def input_sets(
    case: Case, mode: Mode, cache: int, *, most: int, providers: int
) -> tuple[int, bool]:
    """Return how many sets of inputs to rotate through, and whether they exceed the cache.

    Args:
        case: The case.
        mode: A backward holds an output and saved tensors for each set and provider.
        cache: Bytes of the last-level cache; 0 asks for one set, warm.
        most: Sets at most.
        providers: How many are measured.
    """
    one = case.op.traffic(case.shape, "forward", case.dtype.itemsize)
    wanted = -(-2 * cache // one) if cache else 1
    held = one
    if mode == "backward":
        held = case.op.held(case.shape, case.dtype.itemsize) * (2 + providers)
    affordable = max(int(free_bytes(case.device) * 0.5) // held, 1)
    count = max(1, min(wanted, most, affordable))
    return count, count * one >= 2 * cache > 0


def peak(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that one call held beyond what was there before it.

    Args:
        step: The call.
        device: Where it runs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _cpu_peak(step)


def _cpu_peak(step: Callable[[], object]) -> int | None:
    """Add up what PyTorch's CPU allocator gave and took back during a call."""
    from torch.profiler import ProfilerActivity, profile

    # The profiler would report on itself between our lines.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    kineto = getattr(recorded.profiler, "kineto_results", None)
    if kineto is None:
        return None
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
