"""Measure our product on a CPU against ours around PyTorch's and eager: what its plan chooses by.

    python scripts/dispatch_cpu.py [--commit COMMIT]     measure, write benchmarks/cpu-dispatch.json
    python scripts/dispatch_cpu.py --table               only rewrite the table from there

Either writes op/norm_linear/cpu/measured.mojo, the table that kernels are built with. Measured is
the time of one call, in microseconds: medians of interleaved calls, of which those in which a
thread waited for a CPU are left out. Calls rotate through inputs that exceed the last cache
together. What takes the place of our product where it is declined are our passes around
PyTorch's, if the C++ node is built, and in bfloat16 PyTorch's ops.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measured_table
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.backends import compiled as backend
from fused_norm.backends import cpu
from fused_norm.bench import environment
from fused_norm.call import parameters
from fused_norm.call.record import FUSED
from fused_norm.native import cpu_features, node
from fused_norm.ops import compiled, norm_linear

ROOT = Path(__file__).resolve().parent.parent
MEASUREMENTS = ROOT / "benchmarks/cpu-dispatch.json"
TABLE = ROOT / "op/norm_linear/cpu/measured.mojo"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
WEIGHTS = ((128, 128), (769, 97), (768, 768), (768, 3072), (1024, 1024), (4096, 4096))
# More of them take seconds, and are alike.
MOST_PRODUCTS = 5 * 10**9
# What a step takes in Python above one of our compiled autograd, whichever way it goes.
STEP_US = 250
EPS = 1e-5
FEWEST = 5
# An odd number, so that each of two ways meets every set.
MOST_SETS = 41
# Where the ways are as near as this, they are measured again, for longer.
NEAR, LONGER = 0.07, 4

Step = Callable[[int], Any]

ABOUT = """Which of our product and PyTorch's is faster on a CPU with tile registers.

Written by scripts/dispatch_cpu.py, which measured benchmarks/cpu-dispatch.json as well:
`python scripts/dispatch_cpu.py --table` writes it anew from there.
"""
COLUMNS = {
    **{"dtype": "Element type of the tensors.", "K": "Features.", "N": "Outputs.", "M": "Rows."},
    "forward": "Of a forward alone.",
    "training": "Of a forward and its backward together.",
}

clock = time.perf_counter


def main() -> int:
    """Measure, write both files and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=MEASUREMENTS)
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--commit")
    parser.add_argument(
        "--dtype", action="append", choices=list(DTYPES), help="only this one; the rest stays"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and direction")
    parser.add_argument(
        "--busy", action="store_true", help="one thread and its CPU time: other work does not count"
    )
    options = parser.parse_args()
    if options.table:
        TABLE.write_text(table(json.loads(options.out.read_text())["calls"]))
        return 0
    if not cpu_features.has_tiles():
        print("SKIPPED: needs a CPU with tile registers (AMX), and Linux's permission to use them")
        return 0
    global clock
    if options.busy:
        torch.set_num_threads(1)
        clock = time.thread_time
    described = dataclasses.asdict(environment.describe(torch.device("cpu"), options.commit))
    kept = json.loads(options.out.read_text())["calls"] if options.dtype else []
    found = [each for each in kept if each["dtype"] not in options.dtype]
    for name, dtype in DTYPES.items():
        if name not in (options.dtype or DTYPES):
            continue
        for features, outputs in WEIGHTS:
            for rows in ROWS:
                if rows * features * outputs > MOST_PRODUCTS:
                    continue
                us = measure(
                    *(rows, features, outputs, dtype),
                    *(described["cache_bytes"], options.seconds),
                )
                found.append({"dtype": name, "M": rows, "K": features, "N": outputs, "us": us})
                cells = (
                    f"{direction} {way} {us[direction][way] / us[direction]['eager']:.2f}"
                    for direction in us
                    for way in us[direction]
                    if way != "eager"
                )
                print(f"{name} {rows}x{features}x{outputs}: {', '.join(cells)}", flush=True)
                # Whatever ends the run, what has been measured is kept.
                found.sort(key=lambda each: list(DTYPES).index(each["dtype"]))
                content = {"environment": described, "calls": found}
                options.out.write_text(json.dumps(content, indent=1) + "\n")
    TABLE.write_text(table(found))
    return 0


def measure(
    rows: int, features: int, outputs: int, dtype: torch.dtype, cache_bytes: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Return microseconds of each way, of a forward and of a step of training.

    A step of our product is Python's, also where our autograd is compiled: that takes STEP_US less.
    """
    shapes = (rows, features), (features,), (features,), (outputs, features), (outputs,)
    size = dtype.itemsize * (sum(math.prod(shape) for shape in shapes) + rows * outputs)
    count = min(MOST_SETS, 2 * cache_bytes // size) | 1
    sets = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(count)]
    grad_output = torch.randn(rows, outputs).to(dtype)
    cpu.asked_way = lambda: FUSED
    compiled.module = functools.cache(lambda: None)
    cpu.declines.cache_clear()
    known = [parameters.of(gamma, beta, w, bias) for _, gamma, beta, w, bias in sets]

    def eager(x: Tensor, *others: Tensor) -> Tensor:
        gamma, beta, weight, bias = others
        return F.linear(F.layer_norm(x, (features,), gamma, beta, EPS), weight, bias)

    def forward(i: int) -> None:
        cpu.forward(sets[i][0], known[i], EPS, False)

    around = passes_around_products() if dtype is not torch.bfloat16 else None
    steps: dict[str, Step] = {"eager": lambda i: eager(*sets[i]), "fused": forward}
    if around is not None:
        steps["around"] = lambda i: around(*sets[i])
    with torch.inference_mode():
        found = {"forward": times(steps, count, seconds)}
    for tensors in sets:
        for tensor in tensors:
            tensor.requires_grad_()

    def train(function: Callable[..., Tensor], i: int) -> None:
        torch.autograd.grad(function(*sets[i]), sets[i], grad_output)

    def ours(*inputs: Tensor) -> Tensor:
        x, gamma, beta, weight, bias = inputs
        return norm_linear.call(x, (gamma, beta, weight, bias), EPS)

    steps = {"eager": lambda i: train(eager, i), "fused": lambda i: train(ours, i)}
    if around is not None:
        steps["around"] = lambda i: train(around, i)
    return found | {"training": times(steps, count, seconds)}


@functools.cache
def passes_around_products() -> Callable[..., Tensor] | None:
    """Return the call in C++ that finds no product of ours, None where that is not built."""
    found = node.load()
    if found is None:
        return None
    kernels = backend.kernels

    def without_product(x: Tensor, norm: int, is_alone: bool) -> tuple[str, int, str, int]:
        return ("", *kernels(x, norm, is_alone)[1:])

    backend.kernels = without_product
    compiled.tell(found)

    def call(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        before, after = (x, None, gamma, beta, *[None] * 7), (0, 0, EPS, 0.0, *[False] * 4)
        y: Tensor = found.forward(*before, weight, bias, *after)
        return y

    return call


def times(steps: dict[str, Step], count: int, seconds: float) -> dict[str, float]:
    """Return the median of each step's calls, which take turns, as their inputs do."""
    found = _times(steps, count, seconds)
    is_near = abs(found["fused"] / others(found) - 1) < NEAR
    return _times(steps, count, LONGER * seconds) if is_near else found


def _times(steps: dict[str, Step], count: int, seconds: float) -> dict[str, float]:
    every: dict[str, list[float]] = {name: [] for name in steps}
    quiet: dict[str, list[float]] = {name: [] for name in steps}
    turns = itertools.cycle(range(count))
    for step in steps.values():
        step(next(turns))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(every["eager"]) < FEWEST:
        for name, step in steps.items():
            turn = next(turns)
            before, start = waited(), clock()
            step(turn)
            taken = clock() - start
            every[name].append(taken)
            if waited() - before < 1e-6 + taken / 50:
                quiet[name].append(taken)
    is_quiet = all(len(found) >= FEWEST for found in quiet.values())
    return {
        name: round(1e6 * statistics.median((quiet if is_quiet else every)[name]), 2)
        for name in steps
    }


def waited() -> float:
    """Return the seconds that threads of this process have waited for a CPU."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        try:
            total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


def others(us: dict[str, float]) -> float:
    """Return the time of the faster way without our product."""
    return min(us["eager"], us.get("around", us["eager"]))


def table(found: list[dict[str, Any]]) -> str:
    """Return the Mojo file."""
    rows = []
    for each in found:
        ways = [
            "FUSED" if us["fused"] - host_us <= others(us) else "DECLINED"
            for us, host_us in ((each["us"]["forward"], 0), (each["us"]["training"], STEP_US))
        ]
        dtype, K, N, M = (f"{each[name]}," for name in ("dtype", "K", "N", "M"))
        rows.append(f"DType.{dtype:9} {K:5} {N:5} {M:5} {ways[0] + ',':9} {ways[1]}")
    return measured_table.text(
        ABOUT,
        "DECLINED, FUSED",
        "Sizes, and the faster way there.",
        COLUMNS,
        "dtype           K     N     M     forward   training",
        rows,
        "type, weight and rows",
    )


if __name__ == "__main__":
    raise SystemExit(main())
