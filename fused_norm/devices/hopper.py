"""What a forward costs with each strategy on Hopper: a model of few terms, fitted to measurements.

A forward of M rows, K features and N outputs takes, on the device,

    a + b M K + c K N + d M N + e tiles + f rest

microseconds: for its launches, the rows, the weight, the outputs, and for the tiles of the product,
which come in waves over the SMs: the cycles of op/norm_linear/sm90/costs.mojo, for our tiles or for
cuBLAS's. The rest is K for cuBLAS, whose sums may be split between several tiles, and for us M K N
if K is not a multiple of 64: rows that start inside a cache line take longer to load. Up to 64 rows
there are other kernels, whose last two terms are K and N. Launched, a forward takes at least the
host's time. Costs are fitted like those of a CPU (costs.py). If the model would choose a strategy
that was measured to be slower by more than 3 %, the measured size is an exception: sizes near it
take the strategies that were fastest there.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fused_norm.call.record import DECLINED, FUSED, KEPT_FOLD, NEW_FOLD
from fused_norm.devices.costs import TOLERATED, check_costs, fitted, read

# In the order of costs.mojo. Only bfloat16 is folded.
STRATEGIES = {"kept": KEPT_FOLD, "anew": NEW_FOLD, "composed": FUSED, "around": DECLINED}
UNFOLDED = ("composed", "around")
# The most rows that each set of costs is for: 64 is the limit of the kernel for few rows.
ROWS = (64, math.inf)
FITTED = ((1, 64), (65, math.inf))
TERMS = 6
# Elements of a cache line, and of a step of our product's sums.
LINE = 64
# The choices, each among a dtype's strategies: launched, then in a graph, with folds kept and
# without; then the product after a pass.
_ANY, _NOTHING_KEPT = tuple(STRATEGIES), tuple(STRATEGIES)[1:]
CHOICES = ((_ANY, True), (_NOTHING_KEPT, True), (_ANY, False), (_NOTHING_KEPT, False))
DTYPES = ("bfloat16", "float16", "float32")
# For M, K, N: the cycles of our product and of PyTorch's.
Cycles = Callable[[int, int, int], tuple[int, int]]


class GpuCall(NamedTuple):
    """The times of a forward.

    Attributes:
        dtype: Name of the tensors' dtype.
        M: Rows.
        K: Features.
        N: Outputs.
        graph: Microseconds by strategy, replayed from a CUDA graph, and of PyTorch's ops as
            "eager".
        launched: The same, launched one after another.
    """

    dtype: str
    M: int
    K: int
    N: int
    graph: dict[str, float]
    launched: dict[str, float]

    def terms(self, strategy: str, cycles: Cycles) -> tuple[float, ...]:
        """Return the factors of a strategy's costs."""
        M, K, N = self.M, self.K, self.N
        common = (1.0, M * K, K * N, M * N)
        if ROWS[0] >= M:
            return *common, K, N
        ours, others = cycles(M, K, N)
        if strategy == "around":
            return *common, others, K
        return *common, ours, M * K * N if K % LINE else 0.0

    def taken(self, is_launched: bool) -> dict[str, float]:
        """Return the microseconds by strategy, launched or in a graph."""
        return self.launched if is_launched else self.graph


class Hopper(NamedTuple):
    """The model of a kind of Hopper GPU.

    Attributes:
        name: The kind.
        about: Where, with what and when it was measured.
        costs: By "dtype strategy", for each of ROWS, the costs a to e.
        host: Microseconds that the host takes to launch a forward, by strategy.
        exceptions: [dtype, M, K, N, a strategy for each choice, the faster product], by STRATEGIES.
    """

    name: str
    about: dict[str, Any]
    costs: dict[str, list[list[float]]]
    host: dict[str, float]
    exceptions: list[list[Any]]

    def us(self, call: GpuCall, strategy: str, cycles: Cycles) -> float:
        """Return the modeled time of a forward in a graph, infinity without such a strategy."""
        costs = self.costs.get(f"{call.dtype} {strategy}")
        if costs is None:
            return math.inf
        place = next(i for i, most in enumerate(ROWS) if most >= call.M)
        return sum(c * t for c, t in zip(costs[place], call.terms(strategy, cycles), strict=True))

    def chosen(self, call: GpuCall, cycles: Cycles) -> list[str]:
        """Return the strategy of each choice by the model, and the faster product after a pass."""
        us = {strategy: self.us(call, strategy, cycles) for strategy in STRATEGIES}
        return [min(strategies, key=us.__getitem__) for strategies, us in _choices(us, self.host)]

    def as_array(self, dtype: str) -> array[float]:
        """Return what kernels read for a dtype, empty if nothing was measured.

        First the number of exceptions, then the host's costs, the device's by rows and strategy,
        and the exceptions.
        """
        exceptions = [e for e in self.exceptions if e[0] == dtype]
        if f"{dtype} composed" not in self.costs:
            return array("d")
        found = array("d", [len(exceptions), *(self.host[strategy] for strategy in STRATEGIES)])
        for place, strategy in itertools.product(range(len(ROWS)), STRATEGIES):
            none = [[math.inf, *[0.0] * (TERMS - 1)]] * len(ROWS)
            found.extend(self.costs.get(f"{dtype} {strategy}", none)[place])
        for _, M, K, N, *strategies in exceptions:
            found.extend(map(float, (M, K, N, *(STRATEGIES[strategy] for strategy in strategies))))
        return found


def load(path: Path) -> Hopper:
    """Read a device from its file with `costs.read`."""
    return read(path, Hopper, _check)


def _check(device: Hopper) -> None:
    """Raise unless a device has everything that kernels read unchecked.

    Raises:
        ValueError: If it is of another version of the model, or damaged.
    """
    dtypes = {name.split(" ")[0] for name in device.costs}
    needed = {f"{dtype} {strategy}" for dtype in dtypes for strategy in UNFOLDED}
    possible = needed | {f"{dtype} {strategy}" for dtype in dtypes for strategy in STRATEGIES}
    if not needed <= device.costs.keys() <= possible or not dtypes <= set(DTYPES):
        raise ValueError("costs are missing, or of something else")
    if device.host.keys() != STRATEGIES.keys():
        raise ValueError("the host's costs are missing")
    check_costs(device.costs, len(ROWS), TERMS, device.host.values())
    for dtype, M, K, N, *strategies in device.exceptions:
        if dtype not in dtypes or not min(M, K, N) > 0:
            raise ValueError("an exception is of no call")
        if len(strategies) != len(CHOICES) + 1 or not set(strategies) <= STRATEGIES.keys():
            raise ValueError("an exception has no strategy")


def fit(
    name: str,
    about: dict[str, Any],
    calls: Sequence[GpuCall],
    cycles: Cycles,
    host: dict[str, float] | None = None,
) -> Hopper:
    """Return a device fitted to measurements.

    Args:
        name: Its kind.
        about: Where, with what and when it was measured.
        calls: The measurements.
        cycles: Cycles of the products' tiles.
        host: Microseconds that the host takes, by strategy; None for the least that was measured.
    """
    costs = {}
    for dtype, strategy in itertools.product(DTYPES, STRATEGIES):
        members = [c for c in calls if c.dtype == dtype and strategy in c.graph]
        parts = [[c for c in members if lo <= c.M <= hi] for lo, hi in FITTED]
        if all(parts):
            costs[f"{dtype} {strategy}"] = [
                fitted([c.terms(strategy, cycles) for c in part], [c.graph[strategy] for c in part])
                for part in parts
            ]
    if host is None:
        launched = {
            strategy: [c.launched[strategy] for c in calls if strategy in c.launched]
            for strategy in STRATEGIES
        }
        host = {strategy: min(each) for strategy, each in launched.items()}
    device = Hopper(name, about, costs, host, [])
    for call in calls:
        chosen = device.chosen(call, cycles)
        best = [
            min(strategies, key=us.__getitem__) for strategies, us in _choices(call.graph, host)
        ]
        pairs = zip(chosen, best, _choices(call.graph, host), strict=True)
        if any(us[ours] > (1 + TOLERATED) * us[theirs] for ours, theirs, (_, us) in pairs):
            device.exceptions.append([call.dtype, call.M, call.K, call.N, *best])
    return device


def _choices(
    us: dict[str, float], host: dict[str, float]
) -> list[tuple[list[str], dict[str, float]]]:
    """Return the strategies of each choice, and the microseconds of each.

    Args:
        us: The times of the available strategies, in a graph.
        host: The host's times.
    """
    launched = {
        strategy: max(us[strategy], host[strategy]) for strategy in STRATEGIES if strategy in us
    }
    found = [
        ([strategy for strategy in strategies if strategy in us], launched if is_launched else us)
        for strategies, is_launched in CHOICES
    ]
    return [*found, (list(UNFOLDED), us)]
