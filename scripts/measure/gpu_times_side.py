"""Calls of one checkout, timed on request: a process of `gpu_times.py`.

It reads a request in JSON from each line of its input and answers each with a line. A checkout
brings its own providers and timers, which have kept their interfaces since they left the package.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 0
# How long a provider runs before it is timed, in seconds.
WARM_UP = 0.1
# A turn of calls shorter than this has several samples, the first of which is not kept: another
# process has used the caches and the GPU.
SHORT = 1e-3
SAMPLES = 4
# Of Python's thread and of the one that computes gradients.
CORES = 2


class Side:
    """The checkout that this process imports.

    Args:
        checkout: Its folder.
        device: `cuda` or `cpu`.
    """

    def __init__(self, checkout: Path, device: str) -> None:
        is_outside = (checkout / "benchmarks" / "providers.py").is_file()
        harness = "benchmarks" if is_outside else "fused_norm.bench"
        names = ("case", "blocks", "providers", "timing", "environment")
        self._parts = [importlib.import_module(f"{harness}.{name}") for name in names]
        self._device = torch.device(device)
        self._cores = sorted(os.sched_getaffinity(0))
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._timers: dict[str, Any] = {}

    def prepare(
        self, op: str, shape: list[int], mode: str, dtype: str, providers: list[str]
    ) -> dict[str, Any]:
        """Bind an op's providers to the same inputs, compare them with eager and capture graphs.

        Args:
            op: Name of the op.
            shape: M, K and N; none for the one that a block has.
            mode: `forward` or `train`.
            dtype: Name of the dtype.
            providers: Their names, `eager` among them.

        Returns:
            How far each is from eager, and why one has no CUDA graph.
        """
        cases, blocks, every, timing, _ = self._parts
        self._timers.clear()
        torch._dynamo.reset()
        gc.collect()
        run_on(self._cores)
        if self._stream:
            torch.cuda.empty_cache()
        size = type(blocks.SHAPES["vit-l"])(*shape) if shape else blocks.SHAPES[op]
        case = cases.Case(blocks.EVERY[op], size, getattr(torch, dtype), self._device)
        inputs, gradients = case.inputs(SEED), case.grad_outputs(SEED)
        if self._stream:
            torch.cuda.synchronize()
        steps, found = {}, {}
        with torch.set_grad_enabled(mode == "train"), torch.cuda.stream(self._stream):
            for name in providers:
                provider = every.PROVIDERS[op, name]
                bound = provider.prepare(provider.load(), case)(inputs)
                steps[name] = step_of(bound, mode, gradients)
                found[name] = [v.detach() for v in listed(steps[name]()) if v is not None]
        if self._stream:
            # Results are compared on another stream.
            torch.cuda.synchronize()
        deviations = {
            name: max(deviation(*pair) for pair in zip(found[name], found["eager"], strict=True))
            for name in providers
        }
        found.clear()
        problems = {}
        with torch.set_grad_enabled(mode == "train"):
            for name in providers:
                self._timers[name] = timer = (
                    timing.GpuTimer([steps[name]], self._stream)
                    if self._stream
                    else timing.CpuTimer([steps[name]])
                )
                timer.warm_up(WARM_UP)
                problems[name] = getattr(timer, "problem", "")
        gc.collect()
        # Those of the other process, too, which waits meanwhile: cores differ by a third.
        run_on(self._cores[:CORES])
        return {"deviations": deviations, "problems": problems, "shape": list(size)}

    def sample(self, provider: str, mode: str) -> dict[str, float]:
        """Take a provider's turn and return microseconds of a call, by metric.

        Args:
            provider: Its name.
            mode: `forward` or `train`.
        """
        timer = self._timers[provider]
        with torch.set_grad_enabled(mode == "train"):
            samples = [timer.sample()]
            if max(samples[0].values()) < SHORT:
                samples = [timer.sample() for _ in range(SAMPLES)]
        return {m: statistics.median(s[m] for s in samples) * 1e6 for m in samples[0]}

    def describe(self) -> str:
        """Return the version of the library here and whether its autograd node is in C++."""
        environment = self._parts[-1]
        found: str = environment.describe(self._device, "").fused_norm
        return found


def run_on(cores: list[int]) -> None:
    """Have all threads of this process run on some cores."""
    for thread in os.listdir("/proc/self/task"):
        # One may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def step_of(bound: Any, mode: str, gradients: list[Tensor]) -> Callable[[], Any]:
    """Return what is timed: a call, in training with all gradients."""
    call, leaves = bound
    if mode == "forward":
        return call  # type: ignore[no-any-return]
    grad = partial(torch.autograd.grad, grad_outputs=gradients, inputs=leaves, allow_unused=True)
    return lambda: grad(call())


def listed(found: Any) -> list[Any]:
    """Return results, one or several, as a list."""
    return [found] if isinstance(found, Tensor) else list(found)


def deviation(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference, of the norm of what is expected."""
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))


def main() -> None:
    """Answer requests until there are no more."""
    # What libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A timer's samples have no pauses of Python's garbage collector in them.
    gc.disable()
    side = Side(Path(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answer, problem = None, ""
        try:
            answer = getattr(side, name)(**arguments)
        except Exception as error:
            # The other rows may do.
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps([answer, problem]), file=answers, flush=True)


if __name__ == "__main__":
    main()
