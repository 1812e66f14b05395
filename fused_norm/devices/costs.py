"""What a call costs with each strategy: a model of few terms, fitted to measurements on a device.

A call of M rows, K features and N outputs of its products takes

    a + (b M K N + c K N + d M K + e M N + f F) / threads

microseconds: for the call itself, for products, for reading and packing the weight, for the rows,
for the outputs, and for pages that the system has yet to clear. F counts the elements of results
whose memory the C library takes from the system each time, those of 32 MiB and more. The costs are
not negative. They are fitted to the ratios of model and measurement by least squares, for each
dtype, direction and strategy, and separately for one row, few rows and many: PyTorch and we have
separate code for each. One row in float32 has two sets: with a weight that caches no longer hold
when the next call comes, PyTorch's product takes longer for each output. An activation changes a, e
and f. If the model would choose a strategy that was measured to be slower by more than 3 %, the
measured size is an exception: sizes near it take the strategy that was faster there.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

# In the order of chain/choice.h. `around` is our passes around PyTorch's products.
STRATEGIES = ("fused", "around")
KINDS = ("", "activation", "gate")
DIRECTIONS = ("forward", "training")
# The most rows that each set of costs is for, and whether its weights are large. It is fitted to
# the rows that follow; measurements next to a border count on both sides.
SETS = ((1, False), (1, True), (15, False), (math.inf, False))
FITTED = ((1, 1), (1, 1), (2, 32), (8, math.inf))
# One row's weight is large from as many bytes on in float32. In 16 bits that changes little.
LARGE, NEAR = 2**20, 1.4
TERMS = 6
# The terms that an activation changes.
ACTIVATED = (0, 4, 5)
# From this many bytes on, the C library takes memory from the system each time.
FRESH = 2**25
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Smaller differences between strategies do not count.
TOLERATED = 0.03
# Another one for each change of what the terms are: costs of other terms say nothing.
VERSION = 1
SWEEPS = 2000
Kind = TypeVar("Kind")


class Measured(NamedTuple):
    """The times of a call.

    Attributes:
        dtype: Name of the tensors' dtype.
        kind: What follows the product: one of KINDS.
        direction: One of DIRECTIONS; with an activation, training is a forward before a backward.
        threads: The number of threads.
        M: Rows.
        K: Features.
        N: Outputs of the product, twice a gate's.
        us: Microseconds by STRATEGIES, and of PyTorch's ops as "eager".
    """

    dtype: str
    kind: str
    direction: str
    threads: int
    M: int
    K: int
    N: int
    us: dict[str, float]

    def terms(self) -> tuple[float, ...]:
        """Return the factors of its costs."""
        M, K, N = self.M, self.K, self.N
        results = [M * N]
        if self.direction == "training" and not self.kind:
            results += [M * K, K * N]
        fresh = sum(n for n in results if n * BYTES[self.dtype] >= FRESH)
        work = (M * K * N, K * N, M * K, M * N, fresh)
        return (1.0, *(n / self.threads for n in work))


class Device(NamedTuple):
    """The model of a kind of device.

    Attributes:
        name: The kind.
        about: Where, with what and when it was measured, or how it was estimated.
        costs: By "dtype kind direction strategy", for each of SETS, the costs a to f.
        exceptions: [dtype, kind, direction, M, K, N, strategy], by STRATEGIES.
        version: Of the terms.
    """

    name: str
    about: dict[str, Any]
    costs: dict[str, list[list[float]]]
    exceptions: list[list[Any]]
    version: int = VERSION

    def us(self, call: Measured, strategy: str) -> float | None:
        """Return the time of a call by the model, None if nothing like it was measured."""
        costs = self.costs.get(f"{call.dtype} {call.kind} {call.direction} {strategy}")
        if costs is None:
            return None
        return sum(c * t for c, t in zip(costs[_set_of(call)], call.terms(), strict=True))

    def as_array(self, dtype: str) -> array[float]:
        """Return what the chain reads for a dtype, empty if nothing was measured.

        First the number of exceptions, and the bytes of an element; then the costs by kind,
        direction, set and strategy; then the exceptions.
        """
        found = array("d")
        exceptions = [e for e in self.exceptions if e[0] == dtype]
        if not any(name.startswith(f"{dtype} ") for name in self.costs):
            return found
        found.extend((len(exceptions), BYTES[dtype]))
        for kind in KINDS:
            for direction in DIRECTIONS:
                for place in range(len(SETS)):
                    for strategy in STRATEGIES:
                        found.extend(self.costs[f"{dtype} {kind} {direction} {strategy}"][place])
        for _, kind, direction, M, K, N, strategy in exceptions:
            row = (
                KINDS.index(kind),
                DIRECTIONS.index(direction),
                M,
                K,
                N,
                STRATEGIES.index(strategy),
            )
            found.extend(map(float, row))
        return found


def save(device: Any, path: Path) -> None:
    """Write a device, a named tuple, to a file, with each cost and exception on its own line."""
    lines = []
    for name, value in device._asdict().items():
        if name == "costs":
            each = (f"  {json.dumps(key)}: {json.dumps(cost)}" for key, cost in value.items())
            lines.append(f' "{name}": {{\n' + ",\n".join(each) + "\n }")
        elif name == "exceptions":
            each = (f"  {json.dumps(exception)}" for exception in value)
            lines.append(f' "{name}": [\n' + ",\n".join(each) + "\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    # Atomically: another process may read the file, and this one may be interrupted.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    unfinished.replace(path)


def read(path: Path, kind: type[Kind], check: Callable[[Kind], None]) -> Kind:
    """Read a device, a named tuple, from its file.

    Args:
        path: The file.
        kind: The named tuple's class.
        check: Raises unless a device has everything that is read.

    Raises:
        ValueError: If the file has other contents.
    """
    try:
        found, fields = json.loads(path.read_text()), cast(Any, kind)._fields
        device = kind(**{name: found[name] for name in fields})
        check(device)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no measurements of a device: {error}") from error
    return device


def load(path: Path) -> Device:
    """Read a device from its file with `read`."""
    return read(path, Device, _check)


def _check(device: Device) -> None:
    """Raise unless a device has everything that the chain reads unchecked.

    Raises:
        ValueError: If it is of another version of the model, or damaged.
    """
    if device.version != VERSION:
        raise ValueError("costs of other terms")
    if not device.costs:
        raise ValueError("no costs")
    dtypes = {name.split(" ")[0] for name in device.costs}
    every = itertools.product(dtypes, KINDS, DIRECTIONS, STRATEGIES)
    if device.costs.keys() != {" ".join(each) for each in every} or not dtypes <= BYTES.keys():
        raise ValueError("costs are missing, or of something else")
    check_costs(device.costs, len(SETS), TERMS)
    for dtype, kind, direction, M, K, N, strategy in device.exceptions:
        if dtype not in dtypes or kind not in KINDS or direction not in DIRECTIONS:
            raise ValueError("an exception is of no call")
        if strategy not in STRATEGIES or not min(M, K, N) > 0:
            raise ValueError("an exception has no size or no strategy")


def check_costs(
    costs: dict[str, list[list[float]]], rows: int, terms: int, host: Iterable[float] = ()
) -> None:
    """Raise unless costs have the shape of a model, and all are finite and not negative.

    Args:
        costs: The costs by name.
        rows: How many sets of terms each has.
        terms: The terms of a set.
        host: Costs of the host.

    Raises:
        ValueError: If they are of another model, or damaged.
    """
    sets = [each for one in costs.values() for each in one]
    if any(len(one) != rows for one in costs.values()) or any(len(each) != terms for each in sets):
        raise ValueError("the costs are of another model")
    numbers = itertools.chain(*sets, host)
    if not all(math.isfinite(cost) and cost >= 0 for cost in numbers):
        raise ValueError("costs are not finite, or negative")


def fit(name: str, about: dict[str, Any], calls: Sequence[Measured]) -> Device:
    """Return a device fitted to measurements.

    Args:
        name: Its kind.
        about: Where, with what and when it was measured.
        calls: The measurements.
    """
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for call in calls:
        groups.setdefault((call.dtype, call.kind, call.direction), []).append(call)
    costs: dict[str, list[list[float]]] = {}
    for dtype in dict.fromkeys(call.dtype for call in calls):
        for kind, direction, strategy in itertools.product(KINDS, DIRECTIONS, STRATEGIES):
            members = groups.get((dtype, kind, direction), [])
            parts = [_fitted_to(members, place) for place in range(len(SETS))]
            if not kind:
                found = [_fitted(part, strategy, range(TERMS), [0.0] * TERMS) for part in parts]
            else:
                # What follows a forward is not part of the product.
                bare = costs[f"{dtype}  forward {strategy}"]
                both = zip(parts, bare, strict=True)
                found = [_fitted(part, strategy, ACTIVATED, base) for part, base in both]
            costs[f"{dtype} {kind} {direction} {strategy}"] = found
    device = Device(name, about, costs, [])
    for call in calls:
        by_model = [device.us(call, strategy) or 0.0 for strategy in STRATEGIES]
        chosen = STRATEGIES[by_model[1] < by_model[0]]
        other = STRATEGIES[chosen == STRATEGIES[0]]
        if call.us[chosen] > (1 + TOLERATED) * call.us[other]:
            where = [call.dtype, call.kind, call.direction, call.M, call.K, call.N]
            device.exceptions.append([*where, other])
    return device


def _over_large(call: Measured) -> float:
    """Return the ratio of a weight's size to that of a large one, 0 where that does not count."""
    counts = call.M == 1 and call.dtype == "float32"
    return call.K * call.N * BYTES[call.dtype] / LARGE if counts else 0.0


def _set_of(call: Measured) -> int:
    is_large = _over_large(call) >= 1
    return next(i for i, (rows, large) in enumerate(SETS) if rows >= call.M and large == is_large)


def _fitted_to(calls: list[Measured], place: int) -> list[Measured]:
    """Return the calls that a set is fitted to, of the same rows or all if there are none."""
    least, most = FITTED[place]
    of_rows = [c for c in calls if least <= c.M <= most]
    if SETS[place][1]:
        near = [c for c in of_rows if _over_large(c) * NEAR >= 1]
    else:
        near = [c for c in of_rows if _over_large(c) < NEAR]
    return near or of_rows or calls


def _fitted(
    calls: Sequence[Measured], strategy: str, changed: Sequence[int], base: Sequence[float]
) -> list[float]:
    """Return a strategy's costs, some of which are fitted while the others stay."""
    if not calls:
        return list(base)
    terms = [call.terms() for call in calls]
    times = [call.us[strategy] for call in calls]
    rest = [sum(base[i] * t[i] for i in range(TERMS) if i not in changed) for t in terms]
    costs = list(base)
    found = fitted([[t[i] for i in changed] for t in terms], times, rest)
    for i, cost in zip(changed, found, strict=True):
        costs[i] = cost
    return costs


def fitted(
    terms: Sequence[Sequence[float]], times: Sequence[float], rest: Sequence[float] = ()
) -> list[float]:
    """Return nonnegative costs, by coordinate descent on squares of relative errors.

    Args:
        terms: The factors of the costs, for each call.
        times: The time of each call.
        rest: The part of each time that is already known.
    """
    rows = [[term / us for term in each] for each, us in zip(terms, times, strict=True)]
    right = [1 - known / us for known, us in zip(rest or [0.0] * len(times), times, strict=True)]
    count = len(rows[0])
    sizes = [math.sqrt(sum(row[i] ** 2 for row in rows)) or 1.0 for i in range(count)]
    rows = [[v / s for v, s in zip(row, sizes, strict=True)] for row in rows]
    gram = [[sum(r[i] * r[j] for r in rows) for j in range(count)] for i in range(count)]
    wanted = [sum(r[i] * w for r, w in zip(rows, right, strict=True)) for i in range(count)]
    found = [0.0] * count
    for _ in range(SWEEPS):
        for i in range(count):
            if gram[i][i]:
                left = sum(gram[i][j] * found[j] for j in range(count) if j != i)
                found[i] = max(0.0, (wanted[i] - left) / gram[i][i])
    return [float(f"{v / s:.6g}") for v, s in zip(found, sizes, strict=True)]
