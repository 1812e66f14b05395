"""How time is measured: interleaved rounds, rotating inputs, warm-up by time, medians.

In every round each provider takes one sample, in a new random order, so that all of them see the
same machine: its clocks, its other work, and PyTorch's ops before and after them.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from benchmarks.runs import Timing

Step = Callable[[], object]
# A CPU sample of one call as short as this would be half the timer's own time.
SHORTEST_SAMPLE = 50e-6
# Calls in a CUDA graph: enough for the gaps between replays not to count.
CALLS_IN_GRAPH = 16
# Device time of one sample of replays, and of the wait ahead of it that lets the host get ahead.
GRAPH_SAMPLE = 500e-6
BACKLOG_CYCLES = 400_000
# Fewer calls leave the GPU's queue, of about a thousand kernels, far from full.
SUBMITTED_CALLS = 16


class Timer(Protocol):
    """Takes samples of one provider."""

    def warm_up(self, seconds: float) -> None:
        """Run for a while, and learn how long a call takes."""

    def sample(self) -> dict[str, float]:
        """Return seconds per call, by metric."""


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes:
        seconds: Time for each provider.
        warm_up: Time to run before that.
        fewest: Rounds at least, whatever they take.
        most: Rounds at most.
    """

    seconds: float = 1.0
    warm_up: float = 0.2
    fewest: int = 5
    most: int = 200


class CpuTimer:
    """Times calls on the CPU.

    Args:
        steps: One for each set of inputs.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._next = 0
        self._calls = 1

    def warm_up(self, seconds: float) -> None:
        """Run for a while, and choose how many calls make a sample."""
        count, end = 0, time.perf_counter() + seconds
        start = time.perf_counter()
        while time.perf_counter() < end or count == 0:
            self._call()
            count += 1
        took = (time.perf_counter() - start) / count
        self._calls = max(1, math.ceil(SHORTEST_SAMPLE / took))

    def sample(self) -> dict[str, float]:
        """Return the seconds of a call."""
        if self._calls == 1:
            step = self._step()
            start = time.perf_counter()
            step()
            return {"wall": time.perf_counter() - start}
        steps = [self._step() for _ in range(self._calls)]
        start = time.perf_counter()
        for step in steps:
            step()
        return {"wall": (time.perf_counter() - start) / self._calls}

    def _call(self) -> None:
        self._step()()

    def _step(self) -> Step:
        step = self._steps[self._next]
        self._next = (self._next + 1) % len(self._steps)
        return step


class GpuTimer:
    """Times calls on a GPU: device time from graph replays, launches and host time without.

    Args:
        steps: One for each set of inputs.
        stream: The stream that the steps were bound on.
        capture: Makes the context in which to capture a CUDA graph, None for no graph.

    Attributes:
        graph: What was captured, None where nothing was.
        calls_in_graph: How many calls it has.
        problem: Why there is no graph, or empty.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        stream: torch.cuda.Stream,
        capture: Callable[[], AbstractContextManager[None]] | None = nullcontext,
    ) -> None:
        self._steps = steps
        self._stream = stream
        self._context = capture
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls_in_graph = 0
        self._replays = 1
        self.problem = "" if capture else "runs on a stream that CUDA graphs do not record"

    def warm_up(self, seconds: float) -> None:
        """Run for a while, then capture the calls in a graph."""
        with torch.cuda.stream(self._stream):
            end, count = time.perf_counter() + seconds, 0
            torch.cuda.synchronize()
            start = time.perf_counter()
            while time.perf_counter() < end or count < len(self._steps):
                for step in self._steps:
                    step()
                torch.cuda.synchronize()
                count += len(self._steps)
            took = (time.perf_counter() - start) / count
        if self._context is not None:
            try:
                with self._context():
                    self._capture(took)
            except Exception as error:
                # What is captured may be another project's, which may raise whatever it likes; it
                # is then timed without a graph.
                self.graph = None
                self.problem = f"no CUDA graph: {type(error).__name__}: {error}"
                torch.cuda.synchronize()

    def sample(self) -> dict[str, float]:
        """Return the seconds of a call by metric."""
        with torch.cuda.stream(self._stream):
            steps = self._steps
            count = max(SUBMITTED_CALLS // len(steps), 1) * len(steps)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for index in range(count):
                steps[index % len(steps)]()
            submitted = time.perf_counter()
            self._stream.synchronize()
            done = time.perf_counter()
            found = {"launch": (done - start) / count, "host": (submitted - start) / count}
            if self.graph is not None:
                seconds = self._replay(self.graph, self._replays)
                found["graph"] = seconds / (self._replays * self.calls_in_graph)
            return found

    def _capture(self, took: float) -> None:
        # Long calls need no company to hide the gaps between replays.
        wanted = CALLS_IN_GRAPH if took < 1e-3 else 1
        count = math.ceil(wanted / len(self._steps)) * len(self._steps)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # A context that freezes parameters prepares those that calls meet a second time in it,
            # and prepares nothing while a graph is captured.
            for step in (*self._steps, *self._steps):
                step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self._stream):
            output = None
            for index in range(count):
                output = self._steps[index % len(self._steps)]()
        self.graph, self.calls_in_graph = graph, count
        with torch.cuda.stream(self._stream):
            self._assert_recorded(graph, output, self._steps[(count - 1) % len(self._steps)])
            took = self._replay(graph, 1)
        self._replays = max(1, min(10, math.ceil(GRAPH_SAMPLE / max(took, 1e-6))))

    def _assert_recorded(self, graph: torch.cuda.CUDAGraph, output: object, step: Step) -> None:
        """Raise unless a replay computes: work on another stream leaves a graph empty, and fast."""
        recorded, direct = _first_tensor(output).detach(), _first_tensor(step()).detach()
        recorded.fill_(float("nan"))
        graph.replay()
        self._stream.synchronize()
        scale = direct.norm()
        if not (recorded - direct).norm() <= 0.05 * scale:
            raise RuntimeError("a replay does not give what a call gives")

    def _replay(self, graph: torch.cuda.CUDAGraph, times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BACKLOG_CYCLES)
        start.record(self._stream)
        for _ in range(times):
            graph.replay()
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def launching(step: Step, device: torch.device) -> Timer:
    """Return what times a call as it is launched, without a CUDA graph.

    Args:
        step: The call.
        device: Where it runs.
    """
    if device.type == "cpu":
        return CpuTimer([step])
    return GpuTimer([step], torch.cuda.current_stream(device), None)


class Rounds:
    """Samples of several providers, taken in interleaved rounds.

    Args:
        timers: By provider.
        budget: How long to measure.
        seed: Seed of the order in each round.
    """

    def __init__(self, timers: dict[str, Timer], budget: Budget, seed: int) -> None:
        self._timers = dict(timers)
        self._budget = budget
        self._random = random.Random(seed)
        self._samples: dict[str, dict[str, list[float]]] = {name: {} for name in timers}
        # What a provider raised while it was measured.
        self.failures: dict[str, Exception] = {}

    def run(self) -> None:
        """Warm up, then sample until the time is spent. What was sampled stays on an exception."""
        for name in list(self._timers):
            self._guarded(name, lambda timer: timer.warm_up(self._budget.warm_up))
        with _no_collection():
            end = time.perf_counter() + self._budget.seconds * len(self._timers)
            count = 0
            while count < self._budget.fewest or (
                count < self._budget.most and time.perf_counter() < end
            ):
                order = list(self._timers)
                self._random.shuffle(order)
                for name in order:
                    self._guarded(name, partial(self._keep, name))
                count += 1

    def timings(self, provider: str) -> dict[str, Timing]:
        """Return a provider's distributions by metric: empty with fewer than three rounds."""
        samples = self._samples[provider]
        return {metric: summary(values) for metric, values in samples.items() if len(values) > 2}

    def _keep(self, name: str, timer: Timer) -> None:
        for metric, seconds in timer.sample().items():
            self._samples[name].setdefault(metric, []).append(seconds)

    def _guarded(self, name: str, action: Callable[[Timer], None]) -> None:
        try:
            action(self._timers[name])
        except Exception as error:
            # Another project's call may raise whatever it likes; the others go on.
            self.failures[name] = error
            del self._timers[name]


def summary(seconds: Sequence[float]) -> Timing:
    """Return the distribution of samples, in microseconds.

    Args:
        seconds: At least two samples.
    """
    ordered = sorted(value * 1e6 for value in seconds)
    fifths = statistics.quantiles(ordered, n=5, method="inclusive")
    return Timing(
        median=statistics.median(ordered),
        p20=fifths[0],
        p80=fifths[-1],
        minimum=ordered[0],
        rounds=len(ordered),
    )


def _first_tensor(value: object) -> torch.Tensor:
    if isinstance(value, (tuple, list)):
        value = value[0]
    assert isinstance(value, torch.Tensor)
    return value


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of the samples."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
