"""Whether our kernels slow the PyTorch ops around them.

Two thread pools on the same cores, or caches swept clean, would cost a model more than a fast
kernel gains. So one PyTorch op is timed after itself, after PyTorch's own LayerNorm and Linear, and
after ours on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.case import EPS, Case, dtype_name
from benchmarks.runs import Interference
from benchmarks.timing import Budget, CpuTimer, Rounds, Step, Timer
from fused_norm import fused_layernorm_linear, reference


class _AfterAnother(CpuTimer):
    """Times steps each of which follows another, untimed one."""

    def __init__(self, steps: Sequence[Step], others: Sequence[Step]) -> None:
        super().__init__(steps)
        self._others = others
        self._turn = 0

    def warm_up(self, seconds: float) -> None:
        """Run both for a while; a sample is one step, however short."""
        for other in self._others:
            other()
        super().warm_up(seconds)
        self._calls = 1

    def sample(self) -> dict[str, float]:
        """Return the seconds of one step after one of the others."""
        self._others[self._turn]()
        self._turn = (self._turn + 1) % len(self._others)
        return super().sample()


def measure(case: Case, sets: int, budget: Budget, seed: int) -> Interference:
    """Time F.linear by what runs before it.

    Args:
        case: Of the op `layernorm_linear`, on the CPU.
        sets: How many sets of inputs to rotate through.
        budget: How long to measure.
        seed: Seed of the inputs and of the order.
    """
    own = [case.inputs(seed + 10 * index) for index in range(sets)]
    between = [case.inputs(seed + 10 * index + 5) for index in range(sets)]
    ops = [_step(F.linear, [inputs[0], *inputs[3:]]) for inputs in own]
    timers: dict[str, Timer] = {
        "alone": _AfterAnother(
            ops, [_step(F.linear, [inputs[0], *inputs[3:]]) for inputs in between]
        ),
        "eager": _AfterAnother(
            ops, [_step(reference.layernorm_linear, [*inputs, EPS]) for inputs in between]
        ),
        "ours": _AfterAnother(
            ops, [_step(fused_layernorm_linear, [*inputs, EPS]) for inputs in between]
        ),
    }
    rounds = Rounds(timers, budget, seed)
    with torch.no_grad():
        rounds.run()
    for error in rounds.failures.values():
        raise error
    found = {name: rounds.timings(name)["wall"] for name in timers}
    return Interference(
        dtype_name(case.dtype), list(case.sizes), found["alone"], found["eager"], found["ours"]
    )


def _step(function: Callable[..., object], arguments: Sequence[object]) -> Step:
    return lambda: function(*arguments)
