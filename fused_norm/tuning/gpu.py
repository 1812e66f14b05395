"""Measures a call on a GPU with each strategy, replayed from a CUDA graph and launched.

The strategies of a size are interleaved, in a new order each round, on inputs that together exceed
the cache; medians count.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm.call.record import AROUND_PRODUCTS, FUSED, KEPT_FOLD, NEW_FOLD
from fused_norm.chain import kernels, library
from fused_norm.devices import hopper
from fused_norm.devices.hopper import GpuCall, Terms
from fused_norm.freeze import freeze_parameters
from fused_norm.native import build
from fused_norm.ops.operands import at_every_size
from fused_norm.tuning.sizes import DTYPES, Size

# The measured strategies, by their numbers. Only bfloat16 is folded.
STRATEGIES = {"eager": 0, "composed": FUSED, "around": AROUND_PRODUCTS}
FOLDS = {"kept": KEPT_FOLD, "anew": NEW_FOLD}
KEEPING = ("kept", "chosen frozen")
EPS = 1e-5
# More bytes than any GPU cache holds, and the most sets of inputs that share them.
CACHE, MOST_SETS = 150e6, 32
# Calls in a graph, so that gaps between replays do not count, and calls launched in a row.
CALLS, LAUNCHED = 16, 16
# Device time of a sample, and of a delay before it that lets the host get ahead.
SAMPLE_US, BACKLOG_CYCLES = 500.0, 400_000
FEWEST_ROUNDS = 9

# Never freed: launchers keep the address.
_held: list[array[float]] = []


@contextmanager
def strategies() -> Iterator[Callable[[int], None]]:
    """Yield a function that sets the strategy of forwards on Hopper; 0 lets them choose."""
    chain = library.load()
    if chain is None:
        raise RuntimeError(
            "fused_norm has no kernels to measure here: see `python -m fused_norm doctor`"
        )
    before, told = (kernels.gpu_strategy, kernels.hopper_costs), dict[int, int]()
    # Costs with which PyTorch's product is always the faster one after our passes.
    theirs = array("d", [0.0] * (2 + len(hopper.STRATEGIES)))
    for strategy in len(hopper.ROWS) * list(hopper.STRATEGIES):
        theirs.extend((float(strategy != "around"), *[0.0] * (hopper.TERMS - 1)))

    def go(strategy: int) -> None:
        # Without a fold to keep, the call makes one.
        kernels.gpu_strategy = lambda may_keep: (
            NEW_FOLD if strategy == KEPT_FOLD and not may_keep else strategy
        )
        kernels.hopper_costs = before[1]
        if strategy == AROUND_PRODUCTS:
            kernels.hopper_costs = lambda device, dtype: theirs.buffer_info()[0]
        told[strategy] = kernels.tell(chain, told.get(strategy, 0))

    try:
        yield go
    finally:
        kernels.gpu_strategy, kernels.hopper_costs = before
        kernels.tell(chain)
        _held.append(theirs)


@torch.no_grad()
def measure(
    size: Size,
    seconds: float,
    others: Iterable[str] = (),
    *,
    trains: bool = False,
    normalization: str = "layer_norm",
) -> GpuCall:
    """Measure a forward with each strategy.

    Args:
        size: The call.
        seconds: The time to take for each strategy, at least that of 9 rounds.
        others: "chosen" and "chosen frozen", to measure what users get as well.
        trains: Whether a backward with all gradients follows, which rules out strategies that keep
            anything.
        normalization: The norm; `"rms_norm"` has neither a beta nor a bias of the layer.
    """
    dtype, (M, K, N) = DTYPES[size.dtype], size[2:]
    count = max(2, min(MOST_SETS, int(CACHE / (dtype.itemsize * (M * K + K * N + M * N))) + 1))
    is_rms = normalization == "rms_norm"
    # Only x, the weight and gamma.
    sets = [_inputs(M, K, N, dtype)[: 3 if is_rms else None] for _ in range(count)]
    eager: Callable[..., Tensor] = _rms_norm_linear if is_rms else _layer_norm_linear
    ours: Callable[..., Tensor] = _rms_norm_linear_by_us if is_rms else _layer_norm_linear_by_us
    wanted = STRATEGIES | (FOLDS if dtype is torch.bfloat16 else {}) | dict.fromkeys(others, 0)
    if trains:
        wanted = {name: strategy for name, strategy in wanted.items() if name not in KEEPING}
        calls = {name: _trained(eager if name == "eager" else ours) for name in wanted}
    else:
        calls = {name: eager if name == "eager" else ours for name in wanted}
    stream = torch.cuda.Stream()
    graph: dict[str, list[float]] = {name: [] for name in wanted}
    launched: dict[str, list[float]] = {name: [] for name in wanted}
    with strategies() as go, torch.cuda.stream(stream):

        @contextmanager
        def going(name: str) -> Iterator[None]:
            go(wanted[name])
            # While anything is frozen, all calls look it up: these are measured separately.
            held = freeze_parameters(t for s in sets for t in s[1:]) if name in KEEPING else None
            with at_every_size() if wanted[name] else nullcontext():
                yield
            if held is not None:
                held.thaw()

        replays = {}
        for name, call in calls.items():
            with going(name):
                replays[name] = _captured(call, sets, stream)
        names = list(wanted)
        end = time.perf_counter() + seconds * len(names)
        while time.perf_counter() < end or len(graph["eager"]) < FEWEST_ROUNDS:
            random.shuffle(names)
            for name in names:
                graph[name].append(replays[name]())
                if name not in KEEPING:
                    with going(name):
                        launched[name].append(_launched(calls[name], sets, stream))
        for name in names:
            if name in KEEPING:
                with going(name):
                    _launched(calls[name], [*sets, *sets], stream)
                    launched[name] += [
                        _launched(calls[name], sets, stream) for _ in range(FEWEST_ROUNDS)
                    ]
    medians = (
        {name: round(statistics.median(each), 2) for name, each in found.items()}
        for found in (graph, launched)
    )
    return GpuCall(size.dtype, M, K, N, *medians)


def _inputs(M: int, K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    return normal(M, K), normal(N, K) * K**-0.5, normal(K), normal(K), normal(N)


def _layer_norm_linear(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    gamma, beta, bias = rest
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), weight, bias)


def _layer_norm_linear_by_us(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    gamma, beta, bias = rest
    y: Tensor = fn.norm_linear(x, weight, bias, norm_weight=gamma, norm_bias=beta, eps=EPS)
    return y


def _rms_norm_linear(x: Tensor, weight: Tensor, gamma: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], gamma, EPS), weight)


def _rms_norm_linear_by_us(x: Tensor, weight: Tensor, gamma: Tensor) -> Tensor:
    options: Any = {"normalization": "rms_norm", "norm_weight": gamma, "eps": EPS}
    y: Tensor = fn.norm_linear(x, weight, **options)
    return y


def _trained(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a call and its backward, which returns the gradient of the rows."""

    def run(*tensors: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in tensors]
            y = call(*leaves)
            # Any gradient will do, as long as it takes no time to make.
            return torch.autograd.grad(y, leaves, y.detach())[0]

    return run


def _captured(
    call: Callable[..., Tensor], sets: Sequence[Sequence[Tensor]], stream: torch.cuda.Stream
) -> Callable[[], float]:
    """Return a function that replays a graph of calls and returns the microseconds of one."""
    # Twice: parameters are kept from their second call on.
    for tensors in (*sets, *sets):
        call(*tensors)
    count = -(-CALLS // len(sets)) * len(sets)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            y = call(*sets[i % len(sets)])
    graph.replay()
    stream.synchronize()
    expected = call(*sets[(count - 1) % len(sets)]).float()
    if not (y.float() - expected).norm() <= 0.05 * expected.norm():
        raise RuntimeError("a replay does not give what the call gives")

    def us(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BACKLOG_CYCLES)
        start.record(stream)
        for _ in range(times):
            graph.replay()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / times

    times = max(1, min(10, round(SAMPLE_US / max(us(1), 1.0))))
    return lambda: us(times) / count


def _launched(
    call: Callable[..., Tensor], sets: Sequence[Sequence[Tensor]], stream: torch.cuda.Stream
) -> float:
    """Return the microseconds of a call among several, including the host's time."""
    stream.synchronize()
    start = time.perf_counter()
    count = max(LAUNCHED, len(sets))
    for i in range(count):
        call(*sets[i % len(sets)])
    stream.synchronize()
    return (time.perf_counter() - start) * 1e6 / count


def model_terms(device: int) -> Terms:
    """Return a function that finds the terms of a forward on Hopper, by the kernels' model."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    module = build.load(kernels.hopper_extension(torch.bfloat16, 0))

    @functools.cache
    def terms(M: int, K: int, N: int) -> list[list[int]]:
        return [
            [module.term(M, K, N, processors, product, i) for i in range(hopper.TERMS)]
            for product in range(len(hopper.PRODUCTS))
        ]

    return terms
