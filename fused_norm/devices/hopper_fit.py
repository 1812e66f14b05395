"""Fits the model of a kind of Hopper GPU to measurements.

Costs are fitted like those of a CPU (costs.py). If the model would choose a strategy that was
measured to be slower by more than 3 %, the measured size is an exception: sizes near it take the
strategies that were fastest there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fused_norm.devices.costs import TOLERATED, fitted
from fused_norm.devices.hopper import (
    DTYPES,
    ROWS,
    STRATEGIES,
    TERMS,
    GpuCall,
    Hopper,
    Terms,
    choices,
    place,
    terms_of,
)

# Numbers of 16 bits take the same time, whatever they are: a call in one is as good in the other.
AS_GOOD_IN = {"bfloat16": DTYPES[:2], "float16": DTYPES[:2], "float32": DTYPES[2:]}
# The host bounds a call of which the device takes less than this. Its time differs by a factor of
# two, from host to host and from minute to minute: the lowest quarter of such calls is below it.
BOUNDED, QUARTER = 0.5, 4
# In a model, x was just written, and a pass reads it from the cache. It was not where calls were
# measured: so a fold that is made for the call has to gain more than this.
FOLD_GAINS = 1.02
# As many calls as this, twice the costs, tell the costs of a kernel for few rows.
ENOUGH = 2 * TERMS


def fit(name: str, about: dict[str, Any], calls: Sequence[GpuCall], terms: Terms) -> Hopper:
    """Return a device fitted to measurements.

    Args:
        name: Its kind.
        about: Where, with what and when it was measured.
        calls: The measurements.
        terms: Terms of the model.
    """
    device = Hopper(name, about, {}, {s: _host(calls, s) for s in STRATEGIES}, [])
    for dtype in DTYPES:
        members, known = _calls_of(dtype, calls)
        for strategy in known:
            parts = _parts([c for c in members if strategy in c.graph])
            if all(parts):
                device.costs[f"{dtype} {strategy}"] = [
                    fitted(
                        [terms_of(c, strategy, terms) for c in p], [c.graph[strategy] for c in p]
                    )
                    for p in parts
                ]
        if all(f"{dtype} {strategy}" in device.costs for strategy in known):
            device.exceptions.extend(
                [dtype, call.M, call.K, call.N, *best]
                for call in members
                if len(call.graph) == len(known) and (best := _faster(device, call, terms))
            )
    return device


def _parts(calls: list[GpuCall]) -> list[list[GpuCall]]:
    """Return what each set of costs is fitted to: of few rows all, if too few are of one kernel."""
    parts = [[call for call in calls if place(call) == each] for each in range(len(ROWS))]
    *few, tiled = parts
    all_few = list(itertools.chain(*few))
    return [*(part if len(part) >= ENOUGH else all_few for part in few), tiled]


def _calls_of(dtype: str, calls: Sequence[GpuCall]) -> tuple[list[GpuCall], list[str]]:
    """Return what was measured in a dtype, or is as good, and its strategies."""
    own = [call for call in calls if call.dtype == dtype]
    if not own:
        return [], []
    # Float16 has no folds.
    known = [strategy for strategy in STRATEGIES if any(strategy in c.graph for c in own)]
    sizes = {call[1:4] for call in own}
    others = [c for c in calls if dtype in AS_GOOD_IN[c.dtype] and c[1:4] not in sizes]
    found = [
        call._replace(
            dtype=dtype,
            graph={
                s: us * (FOLD_GAINS if s == "anew" else 1)
                for s, us in call.graph.items()
                if s in known
            },
        )
        for call in own + others
    ]
    return found, known


def _faster(device: Hopper, call: GpuCall, terms: Terms) -> list[str]:
    """Return the fastest strategy of each choice, nothing if the model's are about as fast."""
    chosen, pairs = device.chosen(call, terms), choices(call.graph, device.host)
    best = [min(strategies, key=us.__getitem__) for strategies, us in pairs]
    each = zip(chosen, best, pairs, strict=True)
    is_slow = any(us[ours] > (1 + TOLERATED) * us[theirs] for ours, theirs, (_, us) in each)
    return best if is_slow else []


def _host(calls: Sequence[GpuCall], strategy: str) -> float:
    """Return the host's time for a forward with a strategy, 0 if that was not launched."""
    launched = [(c.launched[strategy], c.graph[strategy]) for c in calls if strategy in c.launched]
    bounded = sorted(us for us, on_device in launched if on_device < BOUNDED * us)
    return bounded[len(bounded) // QUARTER] if bounded else min(launched, default=(0.0,))[0]
