"""Time steps of the worklog on a GPU: one with its peers, or all of a size in the same rounds."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import environment
from benchmarks.timing import Budget, GpuTimer, Rounds
from tutorial.worklog.worklog_steps import Sizes, Step

# Bytes of all inputs together, more than twice an L2 cache.
CACHE = 200e6
PROVIDERS = ("step", "cublas", "eager")
# PyTorch with a GELU, where steps with one are interleaved with others.
EAGER_ACTIVATION = "eager-activation"


class GraphTimer(GpuTimer):
    """Times replays alone: of the first steps, every other call would cost seconds."""

    def sample(self) -> dict[str, float]:
        """Return the seconds of a call in a graph.

        Raises:
            RuntimeError: If there is no graph.
        """
        if self.graph is None:
            raise RuntimeError(self.problem)
        with torch.cuda.stream(self._stream):
            seconds = self._replay(self.graph, self._replays)
        return {"graph": seconds / (self._replays * self.calls_in_graph)}


def measured(step: Step, sizes: Sizes, budget: Budget) -> dict[str, Any]:
    """Return the times of a step, of cuBLAS and of PyTorch eager, in microseconds.

    Args:
        step: The step.
        sizes: Of its inputs.
        budget: How long to measure.

    Raises:
        Exception: What any of them raised.
    """
    found, failures = _rounds([step], sizes, budget)
    for failure in failures.values():
        raise failure
    us = found["us"]
    us["eager"] = us.pop(EAGER_ACTIVATION, us.get("eager"))
    found["us"] = {"step": us[step.name], "cublas": us["cublas"], "eager": us["eager"]}
    return sizes._asdict() | found


def together(steps: Sequence[Step], budget: Budget) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Return the times of steps that are interleaved with each other and their peers; and failures.

    Args:
        steps: Steps that are timed at the same sizes first.
        budget: How long to measure.
    """
    (sizes,) = {step.sizes[0] for step in steps}
    found, failures = _rounds(steps, sizes, budget)
    return sizes._asdict() | found, failures


def _rounds(
    steps: Sequence[Step], sizes: Sizes, budget: Budget
) -> tuple[dict[str, Any], dict[str, Exception]]:
    from tutorial.worklog.worklog_cases import Inputs, Run, runs

    M, K, N = sizes
    moved = 2 * (M * K + N * K + M * N)
    count = max(2, min(32, int(CACHE / moved) + 1))
    stream = torch.cuda.Stream()
    calls: dict[str, list[Run]] = {}
    with torch.cuda.stream(stream):
        inputs = [Inputs.random(sizes) for _ in range(count)]
        for step in steps:
            cases = [runs(step, its) for its in inputs]
            eager = EAGER_ACTIVATION if step.kind == "activation" else "eager"
            for name, provider in ((step.name, "step"), ("cublas",) * 2, (eager, "eager")):
                calls.setdefault(name, [case[provider] for case in cases])
        torch.cuda.synchronize()
    rounds = Rounds({name: GraphTimer(its, stream) for name, its in calls.items()}, budget, 0)
    with _clocks() as clocks:
        rounds.run()
    timings = {name: rounds.timings(name).get("graph") for name in calls}
    known = {name: timing for name, timing in timings.items() if timing is not None}
    found = {
        "us": {name: round(timing.median, 2) for name, timing in known.items()},
        "spread": {name: round(timing.spread, 3) for name, timing in known.items()},
        "rounds": min((timing.rounds for timing in known.values()), default=0),
        "mhz": statistics.median_low(clocks) if clocks else None,
    }
    return found, rounds.failures


@contextmanager
def _clocks() -> Iterator[list[int]]:
    """Fill a list with the SMs' clock in MHz, by nvidia-smi five times a second."""
    device = torch.device("cuda", torch.cuda.current_device())
    found: list[int] = []
    done = threading.Event()

    def watch() -> None:
        is_over = False
        while not is_over:
            megahertz = environment.clocks(device).partition(" MHz")[0]
            if megahertz.isdecimal():
                found.append(int(megahertz))
            is_over = done.wait(0.2)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
