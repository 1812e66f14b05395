"""What a forward costs with each strategy on Hopper: a model of few terms, fitted to measurements.

On the device, a forward takes the sum of the terms of op/norm_linear/sm90/terms.mojo, each times a
cost: of its launches, rows, weight, and of its product by our tiles, by those of a fold or by
cuBLAS's. Up to 16 and up to 64 rows there are other kernels, and other costs. Launched, it takes
the longer of the device's time and the host's, which differs from host to host: where they are
close both count, as the root of the sum of squares. At sizes near an exception, the strategies that
were fastest there are taken; hopper_fit.py finds exceptions and costs.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fused_norm.call.record import DECLINED, FUSED, KEPT_FOLD, NEW_FOLD
from fused_norm.devices.costs import check_costs, read

# In the order of costs.mojo. Only bfloat16 is folded.
STRATEGIES = {"kept": KEPT_FOLD, "anew": NEW_FOLD, "composed": FUSED, "around": DECLINED}
UNFOLDED = ("composed", "around")
# The most rows that each set of costs is for, and the most features that only the last one is for:
# limits of the kernels for few rows.
ROWS = (16, 64, math.inf)
TILED = 64
TERMS = 8
# Another one for each change of what the terms are: costs of other terms say nothing.
VERSION = 3
# The choices, each among a dtype's strategies: launched, then in a graph, with folds kept and
# without; then the product after a pass.
_ANY, _NOTHING_KEPT = tuple(STRATEGIES), tuple(STRATEGIES)[1:]
CHOICES = ((_ANY, True), (_NOTHING_KEPT, True), (_ANY, False), (_NOTHING_KEPT, False))
DTYPES = ("bfloat16", "float16", "float32")
# Ours behind a pass, PyTorch's, ours of a fold, and ours in float32, which has fewer tiles.
PRODUCTS = ("ours", "library", "fold", "ours in float32")
# For M, K, N: the terms with each of PRODUCTS.
Terms = Callable[[int, int, int], Sequence[Sequence[int]]]


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

    def taken(self, is_launched: bool) -> dict[str, float]:
        """Return the microseconds by strategy, launched or in a graph."""
        return self.launched if is_launched else self.graph


class Hopper(NamedTuple):
    """The model of a kind of Hopper GPU.

    Attributes:
        name: The kind.
        about: Where, with what and when it was measured.
        costs: By "dtype strategy", for each of ROWS, the cost of each term.
        host: Microseconds that the host takes to launch a forward, by strategy.
        exceptions: [dtype, M, K, N, a strategy for each choice, the faster product], by STRATEGIES.
        version: Of the terms.
    """

    name: str
    about: dict[str, Any]
    costs: dict[str, list[list[float]]]
    host: dict[str, float]
    exceptions: list[list[Any]]
    version: int = VERSION

    def us(self, call: GpuCall, strategy: str, terms: Terms) -> float:
        """Return the modeled time of a forward in a graph, infinity without such a strategy."""
        costs = self.costs.get(f"{call.dtype} {strategy}")
        if costs is None:
            return math.inf
        found = terms_of(call, strategy, terms)
        return sum(cost * term for cost, term in zip(costs[place(call)], found, strict=True))

    def chosen(self, call: GpuCall, terms: Terms) -> list[str]:
        """Return the strategy of each choice by the model, and the faster product after a pass."""
        us = {strategy: self.us(call, strategy, terms) for strategy in STRATEGIES}
        return [min(strategies, key=us.__getitem__) for strategies, us in choices(us, self.host)]

    def as_array(self, dtype: str) -> array[float]:
        """Return what kernels read for a dtype, empty if nothing was measured.

        First the number of exceptions, then our product's place among PRODUCTS, the host's costs,
        the device's by rows and strategy, and the exceptions.
        """
        exceptions = [e for e in self.exceptions if e[0] == dtype]
        if f"{dtype} composed" not in self.costs:
            return array("d")
        found = array("d", [len(exceptions), product(dtype, "composed")])
        found.extend(self.host[strategy] for strategy in STRATEGIES)
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
    if device.version != VERSION:
        raise ValueError("costs of other terms")
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


def place(call: GpuCall) -> int:
    """Return which of ROWS a call's are."""
    if call.K <= TILED:
        return len(ROWS) - 1
    return next(place for place, most in enumerate(ROWS) if most >= call.M)


def product(dtype: str, strategy: str) -> int:
    """Return the place among PRODUCTS of what multiplies with a strategy."""
    if strategy == "composed":
        return PRODUCTS.index("ours in float32" if dtype == "float32" else "ours")
    return PRODUCTS.index("library" if strategy == "around" else "fold")


def terms_of(call: GpuCall, strategy: str, terms: Terms) -> Sequence[int]:
    """Return the terms of a forward with a strategy."""
    return terms(call.M, call.K, call.N)[product(call.dtype, strategy)]


def choices(
    us: dict[str, float], host: dict[str, float]
) -> list[tuple[list[str], dict[str, float]]]:
    """Return the strategies of each choice, and the microseconds of each.

    Args:
        us: The times of the available strategies, in a graph.
        host: The host's times.
    """
    launched = {s: math.hypot(us[s], host[s]) for s in STRATEGIES if s in us}
    found = [
        ([strategy for strategy in strategies if strategy in us], launched if is_launched else us)
        for strategies, is_launched in CHOICES
    ]
    return [*found, (list(UNFOLDED), us)]
