"""Measures a call on this CPU with each strategy.

The strategies of a size are interleaved, on inputs that together exceed the last-level cache, like
a model's weights, and their medians count.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm.call.record import AROUND_PRODUCTS, FUSED
from fused_norm.chain import kernels, library
from fused_norm.devices.costs import Measured
from fused_norm.devices.machine import cache_bytes
from fused_norm.ops.operands import at_every_size
from fused_norm.tuning.sizes import DTYPES, Size

ACTIVATION = {"": None, "activation": "gelu", "gate": "swiglu"}
FEWEST_ROUNDS = 4
# An odd number, so that each strategy uses every set of inputs.
MOST_SETS = 41
EPS = 1e-5


@contextmanager
def strategies() -> Iterator[Callable[[int], None]]:
    """Yield a function that sets the strategy of calls on a CPU from now on; 0 lets them choose."""
    chain = library.load()
    if chain is None:
        raise RuntimeError(
            "fused_norm has no kernels to measure here: see `python -m fused_norm doctor`"
        )
    before, told = kernels.cpu_strategy, dict[int, int]()

    def go(strategy: int) -> None:
        kernels.cpu_strategy = lambda: strategy
        told[strategy] = kernels.tell(chain, told.get(strategy, 0))

    try:
        yield go
    finally:
        kernels.cpu_strategy = before
        kernels.tell(chain)


def measure(
    size: Size,
    direction: str,
    seconds: float,
    others: Iterable[str] = (),
    fewest: int = FEWEST_ROUNDS,
) -> Measured:
    """Measure a call with each strategy.

    Args:
        size: The call.
        direction: "forward", or "training": with a backward; before an activation, it only keeps
        what a backward needs.
        seconds: The time to take, at least that of the fewest rounds.
        others: "chosen", to measure what users get as well.
        fewest: Calls with each strategy.
    """
    dtype, K, outputs = DTYPES[size.dtype], size.K, size.N // (2 if size.kind == "gate" else 1)
    shapes = (size.M, K), (K,), (K,), (size.N, K), (size.N,)
    # Scaled like a model's weights: larger ones would give exponentials beyond normal numbers.
    scales = 1.0, 1.0, 1.0, K**-0.5, 1.0
    elements = sum(math.prod(shape) for shape in shapes) + size.M * size.N
    count = min(MOST_SETS, 2 * cache_bytes() // (dtype.itemsize * elements)) | 1
    # The same numbers in each set: only their places in memory count.
    drawn = [(torch.randn(shape) * s).to(dtype) for shape, s in zip(shapes, scales, strict=True)]
    sets = [drawn, *([tensor.clone() for tensor in drawn] for _ in range(count - 1))]
    grad_output = torch.randn(size.M, outputs).to(dtype)
    activation = ACTIVATION[size.kind]
    act = composed_activation(size.kind)

    def eager(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return act(F.linear(F.layer_norm(x, (K,), gamma, beta, EPS), weight, bias))

    def ours(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return fn.norm_linear(
            x, weight, bias, norm_weight=gamma, norm_bias=beta, eps=EPS, activation=activation
        )

    if direction == "training":
        for tensors in sets:
            for tensor in tensors:
                tensor.requires_grad_()

    def step(call: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        y = call(*tensors)
        if direction == "training" and not size.kind:
            torch.autograd.grad(y, tensors, grad_output)

    calls = {"eager": (eager, 0), "fused": (ours, FUSED), "around": (ours, AROUND_PRODUCTS)}
    if "chosen" in others:
        calls["chosen"] = (ours, 0)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    turns = itertools.cycle(sets)
    with strategies() as go, torch.inference_mode(direction == "forward"):
        for call, strategy in calls.values():
            go(strategy)
            with at_every_size() if strategy else nullcontext():
                step(call, next(turns))
        end = time.perf_counter() + seconds
        names = list(calls)
        while time.perf_counter() < end or len(taken["eager"]) < fewest:
            random.shuffle(names)
            for name in names:
                call, strategy = calls[name]
                tensors = next(turns)
                go(strategy)
                with at_every_size() if strategy else nullcontext():
                    start = time.perf_counter()
                    step(call, tensors)
                    taken[name].append(time.perf_counter() - start)
    us = {name: round(1e6 * statistics.median(each), 2) for name, each in taken.items()}
    return Measured(
        size.dtype, size.kind, direction, torch.get_num_threads(), size.M, K, size.N, us
    )


def composed_activation(kind: str) -> Callable[[Tensor], Tensor]:
    """Return the op after a product, with PyTorch's ops."""
    if kind == "gate":
        return lambda h: F.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :]
    return F.gelu if kind else lambda h: h
