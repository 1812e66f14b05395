"""Measure calls on this CPU with each strategy, and fit the model that chooses for its kind.

    python scripts/measure/cpu_calls.py [--commit COMMIT]   measure, and write both files
    python scripts/measure/cpu_calls.py --most-rows ROWS    measure the calls of few rows again
    python scripts/measure/cpu_calls.py --direction training --kinds '' --most-rows ROWS
                                                            only some of them
    python scripts/measure/cpu_calls.py --missing           measure what the file lacks
    python scripts/measure/cpu_calls.py --fit               only fit again, every kind

Measurements are benchmarks/results/cpu-calls-KIND.json; what is fitted to them is
fused_norm/devices/data/KIND.json, which the library reads. Kinds that nobody has measured are
estimated from the one that is nearest, and say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import Progress

from benchmarks import document, environment
from fused_norm.devices import choice, costs
from fused_norm.devices.costs import DIRECTIONS, Measured
from fused_norm.devices.machine import cpu_kind
from fused_norm.tuning import sizes as drawing
from fused_norm.tuning.cpu import measure as measure_call
from fused_norm.tuning.sizes import Size

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
# Sizes of common models, in addition to random ones.
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
WEIGHTS = ((128, 128), (768, 768), (768, 3072), (1024, 1024), (4096, 4096))
RANDOM = 450
# Calls whose time is that of starting them; random ones are seldom so small.
TINY_ROWS = (1, 4, 16)
TINY_WEIGHTS = ((16, 64), (96, 48))
# Outputs so large that the C library takes their memory from the system each time.
WIDE = ((512, 16, 32768), (2048, 64, 8192))
# More random calls of few features, and of one row in the dtypes that need them; of these, only
# weights of at most that many elements, since others take long.
ONE_ROW = ("float32", "float16")
MORE, FEW_FEATURES, MOST_WEIGHT = 1000, 32, 2**24
# Where measurement and model differ by more, a size is measured again, for longer.
DOUBTFUL, LONGER = 1.4, 3
# More rows than any call has.
MANY = 2**31
# Kinds without measurements, and the kind whose ratios of our times and PyTorch's they use: one
# that was measured while few rows were packed there, as they are on Arm.
ESTIMATED = {"arm-neon": "intel-avx2"}
# Calls of up to as many rows had slower kernels when most kinds were measured: of each kind as many
# as op/gemm/cpu/few_rows.mojo takes in some dtype. A file has the number of the kernels for them
# that it was measured with.
FEW_ROWS = defaultdict(lambda: 8, {"amd-zen4": 48, "amd-zen5": 48})
FEW_ROWS_KERNELS = 2


def main() -> int:
    """Measure or fit, write the files and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--fit", action="store_true", help="only fit again")
    parser.add_argument("--commit")
    parser.add_argument(
        "--most-rows",
        type=int,
        help="only calls of as many rows, whose kernels changed; the file says which those are",
    )
    parser.add_argument("--least-rows", type=int, help="only calls of as many rows or more, again")
    parser.add_argument("--direction", choices=DIRECTIONS, help="only these calls, again")
    parser.add_argument("--kinds", nargs="+", choices=costs.KINDS, help="only these calls, again")
    dtypes = tuple(drawing.DTYPES)
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, help="only these calls, again")
    parser.add_argument("--missing", action="store_true", help="only what the file lacks")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each call (default: 0.3)")
    options = parser.parse_args()
    if not options.fit:
        kind = cpu_kind()
        if kind is None:
            print("SKIPPED: needs a CPU with AVX2, or Arm's")
            return 0
        if options.missing:
            measure_missing(kind, options.seconds, options.commit)
        elif any(
            (
                options.most_rows,
                options.least_rows,
                options.direction,
                options.kinds,
                options.dtypes,
            )
        ):
            which = Which(
                options.least_rows or 1,
                options.most_rows or MANY,
                [options.direction] if options.direction else list(DIRECTIONS),
                options.kinds or list(costs.KINDS),
                options.dtypes or list(dtypes),
            )
            measure_again(kind, options.seconds, options.commit, which)
        else:
            measure(kind, options.seconds, options.commit)
    for kind, device in fitted().items():
        costs.save(device, choice.SHIPPED / f"{kind}.json")
        print(f"{kind}: {device.about}, {len(device.exceptions)} exceptions")
    return 0


def file_of(kind: str) -> Path:
    """Return the file of a kind's measurements."""
    return RESULTS / f"cpu-calls-{kind}.json"


def sizes() -> list[Size]:
    """Return what is measured."""
    grid = [
        Size(dtype, "", M, K, N)
        for dtype, (K, N), M in itertools.product(drawing.DTYPES, WEIGHTS, ROWS)
        if M * K * N * (1 if dtype == "float32" else 8) <= drawing.MOST_PRODUCTS
    ]
    tiny = [
        Size(dtype, kind, M, K, N)
        for dtype, kind, (K, N), M in itertools.product(
            drawing.DTYPES, costs.KINDS, TINY_WEIGHTS, TINY_ROWS
        )
    ]
    wide = [
        Size(dtype, kind, *each)
        for dtype, kind, each in itertools.product(drawing.DTYPES, costs.KINDS, WIDE)
        if math.prod(each) * (1 if dtype == "float32" else 8) <= drawing.MOST_PRODUCTS
    ]
    more = [
        size
        for size in drawing.draw(MORE, drawing.SEED + 1)
        if (size.dtype in ONE_ROW if size.M == 1 else size.K <= FEW_FEATURES)
        and size.K * size.N <= MOST_WEIGHT
    ]
    return grid + drawing.draw(RANDOM, drawing.SEED) + tiny + wide + more


def measure(kind: str, seconds: float, commit: str | None) -> None:
    """Write the measurements of this CPU."""
    described = dataclasses.asdict(environment.describe(torch.device("cpu"), commit))
    calls: list[Measured] = []
    with Progress() as progress:
        wanted = sizes()
        for size in progress.track(wanted, description=kind):
            calls += [measure_call(size, direction, seconds) for direction in DIRECTIONS]
        repeat_doubtful(kind, calls, range(len(calls)), seconds, progress)
    # One thread, at some of the sizes.
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
        for size in wanted[::5]:
            calls += [measure_call(size, direction, seconds) for direction in DIRECTIONS]
        torch.set_num_threads(threads)
    head = {"environment": described, "few_rows_kernels": FEW_ROWS_KERNELS}
    head["fields"] = Measured._fields
    document.write_rows(file_of(kind), head, "calls", calls)


class Which(NamedTuple):
    """The calls that are measured again.

    Attributes:
        least_rows: The fewest rows.
        most_rows: The most rows.
        directions: Some of DIRECTIONS.
        kinds: Some of KINDS.
        dtypes: Names of some of the dtypes.
    """

    least_rows: int
    most_rows: int
    directions: list[str]
    kinds: list[str]
    dtypes: list[str]

    def has(self, call: Measured) -> bool:
        """Return whether a call is one of them."""
        is_between = self.least_rows <= call.M <= self.most_rows
        is_like = call.direction in self.directions and call.kind in self.kinds
        return is_between and is_like and call.dtype in self.dtypes

    def has_all(self, rows: int) -> bool:
        """Return whether all calls of up to a number of rows are among them."""
        every = (DIRECTIONS, costs.KINDS, drawing.DTYPES)
        some = (self.directions, self.kinds, self.dtypes)
        is_every = all(map(lambda a, b: len(a) == len(b), some, every))
        return is_every and self.least_rows == 1 and self.most_rows >= rows


def measure_again(kind: str, seconds: float, commit: str | None, which: Which) -> None:
    """Replace some measurements of this kind of CPU."""
    content = json.loads(file_of(kind).read_text())
    calls = [Measured(*each) for each in content.pop("calls")]
    threads = torch.get_num_threads()
    replaced = [i for i, call in enumerate(calls) if which.has(call)]
    with Progress() as progress:
        for i in progress.track(replaced, description=kind):
            calls[i] = measured_again(calls[i], seconds)
        repeat_doubtful(kind, calls, replaced, seconds, progress)
    torch.set_num_threads(threads)
    described = dataclasses.asdict(environment.describe(torch.device("cpu"), commit))
    again = content.get("again", [])
    again = again if isinstance(again, list) else [again]
    content["again"] = [*again, {**which._asdict(), "environment": described}]
    if which.has_all(FEW_ROWS[kind]):
        content["few_rows_kernels"] = FEW_ROWS_KERNELS
    document.write_rows(file_of(kind), content, "calls", calls)


def measure_missing(kind: str, seconds: float, commit: str | None) -> None:
    """Add the calls that the measurements of this kind of CPU lack."""
    content = json.loads(file_of(kind).read_text())
    calls = [Measured(*each) for each in content.pop("calls")]
    there = {(*_size_of(call), call.direction) for call in calls}
    first = len(calls)
    with Progress() as progress:
        for size in progress.track(sizes(), description=kind):
            missing = [d for d in DIRECTIONS if (*size, d) not in there]
            calls += [measure_call(size, direction, seconds) for direction in missing]
        repeat_doubtful(kind, calls, range(first, len(calls)), seconds, progress)
    described = dataclasses.asdict(environment.describe(torch.device("cpu"), commit))
    content["added"] = {"calls": len(calls) - first, "environment": described}
    document.write_rows(file_of(kind), content, "calls", calls)


def _size_of(call: Measured) -> Size:
    return Size(call.dtype, call.kind, call.M, call.K, call.N)


def repeat_doubtful(
    kind: str, calls: list[Measured], which: Sequence[int], seconds: float, progress: Progress
) -> None:
    """Measure again what the model is far from, or other work has disturbed."""
    device = costs.fit(kind, {}, calls)
    doubtful = [i for i in which if is_doubtful(calls[i], device)]
    for i in progress.track(doubtful, description="again"):
        calls[i] = measured_again(calls[i], LONGER * seconds)


def measured_again(call: Measured, seconds: float) -> Measured:
    """Return a new measurement of a call, with as many threads as it had."""
    torch.set_num_threads(call.threads)
    return measure_call(_size_of(call), call.direction, seconds)


def is_doubtful(call: Measured, device: costs.Device) -> bool:
    """Return whether a measurement and the model differ by much, or choose differently."""
    by_model = {strategy: device.us(call, strategy) or 0.0 for strategy in costs.STRATEGIES}
    is_far = any(
        not 1 / DOUBTFUL < call.us[strategy] / us < DOUBTFUL for strategy, us in by_model.items()
    )
    chosen = min(by_model, key=lambda strategy: by_model[strategy])
    return is_far or call.us[chosen] > (1 + costs.TOLERATED) * min(
        call.us[w] for w in costs.STRATEGIES
    )


def fitted() -> dict[str, costs.Device]:
    """Return the devices of all kinds by the files of measurements."""
    found = {}
    for path in sorted(RESULTS.glob("cpu-calls-*.json")):
        kind = path.stem.removeprefix("cpu-calls-")
        content = json.loads(path.read_text())
        calls = [Measured(*each) for each in content["calls"]]
        env = content["environment"]
        about = {"measured": env["date"], "cpu": env["cpu"], "threads": env["threads"]}
        about |= {"torch": env["torch"], "calls": len(calls)}
        if content.get("few_rows_kernels") != FEW_ROWS_KERNELS:
            about["estimated"] = f"for calls of up to {FEW_ROWS[kind]} rows, as with slower kernels"
        found[kind] = costs.fit(kind, about, calls)
    for kind, like in ESTIMATED.items():
        if kind not in found and like in found:
            about = {"estimated": f"as {like}, not measured"}
            found[kind] = found[like]._replace(name=kind, about=about)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
