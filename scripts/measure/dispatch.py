"""Measure every way that a forward can run on Hopper, over rows: what its plan chooses by.

    python scripts/measure/dispatch.py [--commit COMMIT]     measure, write h200-dispatch.json
    python scripts/measure/dispatch.py --table               only rewrite the table from there

Either writes op/norm_linear/sm90/measured.mojo, the table that kernels are built with. Measured is
the device time of one call, in microseconds: medians of interleaved rounds of CUDA-graph replays,
over inputs and weights that do not fit the cache. `kept` multiplies by a weight folded before,
`anew` folds it in every call, `composed` normalizes first, `torch` does so around PyTorch's
product.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import measured_table
import torch
from hopper_records import Fold, fold_of, record_of
from torch import Tensor

from benchmarks import environment
from benchmarks.case import EPS
from benchmarks.timing import Budget, GpuTimer, Rounds, Step
from fused_norm import reference
from fused_norm.call import record
from fused_norm.chain import kernels as chain_kernels
from fused_norm.chain import library

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "benchmarks/results/h200-dispatch.json"
TABLE = ROOT / "op/norm_linear/sm90/measured.mojo"
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WEIGHTS = (
    *((4096, 4096), (1024, 1024), (768, 2304), (4096, 12288)),
    *((2048, 2048), (1024, 4096), (1280, 5120)),
)
CACHE = 150e6

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def main() -> int:
    """Measure, write both files and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=MEASUREMENTS)
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--commit")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each way")
    options = parser.parse_args()
    if options.table:
        TABLE.write_text(table(json.loads(options.out.read_text())["forward"]))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("SKIPPED: needs a Hopper GPU")
        return 0
    budget = Budget(options.seconds, options.seconds / 2, fewest=9)
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for features, outputs in WEIGHTS:
        for rows in ROWS:
            times = measure(rows, features, outputs, budget)
            found.append({"M": rows, "K": features, "N": outputs, "us": times})
            eager = times["eager"]
            cells = (f"{way} {time / eager:.2f}" for way, time in times.items() if way != "eager")
            print(
                f"{rows}x{features}x{outputs}: eager {eager:.1f} us, {', '.join(cells)}", flush=True
            )
    described = dataclasses.asdict(environment.describe(device, options.commit))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"environment": described, "forward": found}, indent=1) + "\n"
    )
    TABLE.write_text(table(found))
    return 0


@torch.no_grad()
def measure(rows: int, features: int, outputs: int, budget: Budget) -> dict[str, float]:
    """Return microseconds by way, in bfloat16."""
    stream = torch.cuda.Stream()
    moved = 2 * (rows * features + features * outputs + rows * outputs)
    count = max(2, min(32, int(CACHE / moved) + 1))
    with torch.cuda.stream(stream):
        steps: dict[str, list[Step]] = {way: [] for way in WAYS}
        for _ in range(count):
            inputs = _inputs(rows, features, outputs)
            kept = fold_of(inputs[1:])
            for way, calls in steps.items():
                calls.append(partial(run, way, inputs, kept))
    rounds = Rounds({way: GpuTimer(each, stream) for way, each in steps.items()}, budget, 0)
    rounds.run()
    for failure in rounds.failures.values():
        raise failure
    return {way: round(rounds.timings(way)["graph"].median, 2) for way in steps}


WAYS = ("eager", "kept", "anew", "composed", "torch")


# What a call of each way takes of the host, in microseconds: docs/hopper-log.md.
HOST = {"kept": 13.0, "anew": 19.0, "composed": 15.0, "torch": 22.0}
# What the record calls them.
NAMES = {"kept": "KEPT_FOLD", "anew": "NEW_FOLD", "composed": "FUSED", "torch": "DECLINED"}

ABOUT = """Which way of the forward is fastest on Hopper at the sizes that were measured.

Written by scripts/measure/dispatch.py, which measured
benchmarks/results/h200-dispatch.json as well:
`python scripts/measure/dispatch.py --table` writes it anew from there. Where a call is
DECLINED, our norm around PyTorch's product is faster, which takes the host longer
to launch.
"""
EACH = """Sizes, and the fastest way there: launched one by one or replayed in a CUDA
    graph, where a fold may be kept or not."""
COLUMNS = {
    **{"K": "Features.", "N": "Outputs.", "M": "Rows."},
    "launched_kept": "Launched, and a fold may be kept.",
    "launched": "Launched, and none may.",
    "graph_kept": "In a graph, and a fold may be kept.",
    "graph": "In a graph, and none may.",
    "passed": "Behind a pass that is there anyway: FUSED for our product, DECLINED for PyTorch's.",
}


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the fastest ways as the text of op/norm_linear/sm90/measured.mojo.

    Args:
        found: The measurements, in the order of rows.
    """
    rows = []
    for measured in found:
        sizes = [f"{measured[size]}," for size in "KNM"]
        ways = [f"{NAMES[way]}," for way in fastest(measured["us"])]
        *columns, last = [f"{size:6}" for size in sizes] + [f"{way:10}" for way in ways]
        rows.append(f"{' '.join(columns)} {last.rstrip(' ,')}")
    return measured_table.text(
        ABOUT,
        "from ..plan import DECLINED, FUSED, KEPT_FOLD, NEW_FOLD",
        EACH,
        COLUMNS,
        "K      N      M      launched: kept, none  graph: kept, none   passed",
        rows,
        "weight and then by rows",
    )


def fastest(times: dict[str, float]) -> list[str]:
    """Return the fastest way with a fold that is kept and without, launched and then in a graph.

    Last comes the faster product behind a pass.
    """
    without = ("composed", "torch", "anew")
    launched = {way: (max(times[way], host), times[way]) for way, host in HOST.items()}
    replayed = {way: (times[way], times[way]) for way in HOST}
    return [
        min(ways, key=costs.__getitem__)
        for costs in (launched, replayed)
        for ways in (("kept", *without), without)
    ] + [min(("composed", "torch"), key=times.__getitem__)]


def run(way: str, inputs: Inputs, kept: Fold) -> Tensor:
    """Compute a forward in one way."""
    x, gamma, beta, weight, bias = inputs
    if way == "eager":
        return reference.layernorm_linear(x, gamma, beta, weight, bias)
    if way == "torch":
        return _around_products(inputs)
    kernels, context = _kernels()
    call = record_of(inputs, EPS)
    call.context, call.way = context, getattr(record, NAMES[way])
    call.fold_weight, call.fold_sums, call.fold_constants = kept.addresses
    place = ctypes.addressof(call)
    kernels.plan_forward(place)
    y = x.new_empty(len(x), len(weight))
    scratch = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=x.device)
    call.y, call.workspace = y.data_ptr(), scratch.data_ptr()
    kernels.forward(place)
    return y


def _around_products(inputs: Inputs) -> Tensor:
    """Return y by our pass and PyTorch's product."""
    x, gamma, beta, weight, bias = inputs
    with mock.patch.object(chain_kernels, "gpu_way", return_value=record.AROUND_PRODUCTS):
        if (chain := library.load()) is not None:
            chain_kernels.tell(chain)
        op = torch.ops.fused_norm.norm_linear_forward
        named = (None, gamma, beta, *[None] * 8)
        kind = ("layer_norm", "", EPS, 0.0, *[False] * 5)
        found: list[Tensor] = op(x, *named, [weight], [bias], *kind, False)
    return found[0]


def _kernels() -> tuple[Any, int]:
    device = torch.cuda.current_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernels = chain_kernels.hopper_extension(torch.bfloat16, 0)
    return chain_kernels.launcher(kernels, device, stream, True)


def _inputs(rows: int, features: int, outputs: int) -> Inputs:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    weight = random(outputs, features) * features**-0.5
    return random(rows, features), random(features), random(features), weight, random(outputs)


if __name__ == "__main__":
    sys.exit(main())
