"""Measure our product on a CPU against ours around PyTorch's and eager: what its plan chooses by.

    python scripts/measure/dispatch_cpu.py [--commit COMMIT]  measure, write cpu-dispatch-*.json
    python scripts/measure/dispatch_cpu.py --table            only rewrite the table from there

Either writes op/norm_linear/cpu/measured.mojo, the table that kernels are built with. Each set of
instructions has a file of its own: tiles (AMX), AVX-512 and AVX2. The last, on a CPU with more:

    export FUSED_NORM_TARGET_CPU=x86-64-v3 ATEN_CPU_CAPABILITY=avx2
    export ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
    python scripts/measure/dispatch_cpu.py --most 3e8

Measured is
the time of one call, in microseconds: medians of interleaved calls, of which those in which a
thread waited for a CPU are left out. Calls rotate through inputs that exceed the last cache
together. What takes the place of our product where it is declined are our passes around
PyTorch's. All of it runs in the C++ node, which has to be built.
Ours is chosen where it is clearly faster.

What a backward costs with an activation is what it costs without, and a pass more whichever way the
product goes. So an activation's measurements are of its forward: alone, and keeping what a backward
needs.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measured_table
import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from benchmarks import environment
from fused_norm.activations import ACTIVATIONS
from fused_norm.call.record import FUSED
from fused_norm.chain import kernels, library
from fused_norm.native import cpu_features
from fused_norm.ops import node

ROOT = Path(__file__).resolve().parents[2]
# Sets of instructions, and what the table calls them.
LEVELS = {"tiles": "TILES", "avx512": "AVX512", "avx2": "AVX2"}
TABLE = ROOT / "op/norm_linear/cpu/measured.mojo"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
WEIGHTS = ((128, 128), (769, 97), (768, 768), (768, 3072), (1024, 1024), (4096, 4096))
# More of them take seconds, and are alike.
MOST_PRODUCTS = 5 * 10**9
# Activations by the names of their numbers: one of those without a gate, one with.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda h: h,
    "gelu": F.gelu,
    "swiglu": lambda h: F.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :],
}
NAMES = {"": "0", "gelu": "Int(GELU)", "swiglu": "GATED + Int(SILU)"}
# With one, at fewer sizes: where a product alone is about as fast either way.
ACTIVATED_ROWS = (1, 64, 512, 2048, 4096)
ACTIVATED_WEIGHTS = ((768, 3072), (1024, 1024))
EPS = 1e-5
FEWEST = 5
# An odd number, so that each of two ways meets every set.
MOST_SETS = 41
# Where the ways are as near as this, they are measured again, for longer.
NEAR, LONGER = 0.07, 4
# PyTorch's product is the surer one: from run to run the two differ by some percent.
CLEARLY = 0.95

Step = Callable[[int], Any]

ABOUT = """Which of our product and PyTorch's is faster on a CPU.

Written by scripts/measure/dispatch_cpu.py, which measured
benchmarks/results/cpu-dispatch-*.json as well:
`python scripts/measure/dispatch_cpu.py --table` writes it anew from there.
"""
IMPORTS = """from ...gemm.activation import GATED, GELU, SILU
from ..plan import DECLINED, FUSED

comptime AVX2 = 0
\"\"\"AVX2.\"\"\"
comptime AVX512 = 1
\"\"\"AVX-512, with or without instructions for bfloat16.\"\"\"
comptime TILES = 2
\"\"\"Tile registers (AMX).\"\"\""""
COLUMNS = {
    "level": "The set of instructions: AVX2, AVX512 or TILES (AMX).",
    **{"dtype": "Element type of the tensors.", "K": "Features.", "N": "Outputs.", "M": "Rows."},
    "activation": "An activation's number, or 0: those with a gate are alike, and the others.",
    "forward": "Of a forward alone.",
    "training": "Of a forward and its backward; with an activation, of a forward before one.",
}

clock = time.perf_counter


def main() -> int:
    """Measure, write both files and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="instead of the file of the set of instructions")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--commit")
    parser.add_argument(
        "--dtype", action="append", choices=list(DTYPES), help="only this one; the rest stays"
    )
    parser.add_argument(
        "--activation", action="append", choices=list(KINDS), help="only this one; the rest stays"
    )
    parser.add_argument(
        "--most", type=float, default=MOST_PRODUCTS, help="products of the largest sizes"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and direction")
    parser.add_argument(
        "--busy", action="store_true", help="one thread and its CPU time: other work does not count"
    )
    options = parser.parse_args()
    if options.table:
        TABLE.write_text(table())
        return 0
    level = level_of_this_cpu()
    if level is None:
        print("SKIPPED: needs a CPU with AVX2")
        return 0
    if library.load_node() is None:
        print("SKIPPED: needs the C++ node: python -m fused_norm build --autograd")
        return 0
    global clock
    if options.busy:
        torch.set_num_threads(1)
        clock = time.thread_time
    described = dataclasses.asdict(environment.describe(torch.device("cpu"), options.commit))
    dtypes, kinds = options.dtype or list(DTYPES), options.activation or list(KINDS)
    is_partial = bool(options.dtype or options.activation)
    out = options.out or file_of(level)
    kept = json.loads(out.read_text())["calls"] if is_partial else []
    found = [
        each for each in kept if each["dtype"] not in dtypes or each["activation"] not in kinds
    ]
    for name, kind, features, outputs, rows in sizes(dtypes, kinds, options.most):
        us = measure(
            *(rows, features, outputs, DTYPES[name], kind),
            *(described["cache_bytes"], options.seconds),
        )
        found.append(
            {
                "dtype": name,
                "M": rows,
                "K": features,
                "N": outputs,
                "activation": kind,
                "us": us,
            }
        )
        cells = (
            f"{direction} {way} {us[direction][way] / us[direction]['eager']:.2f}"
            for direction in us
            for way in us[direction]
            if way != "eager"
        )
        print(f"{name} {rows}x{features}x{outputs} {kind}: {', '.join(cells)}", flush=True)
        # Whatever ends the run, what has been measured is kept.
        found.sort(key=lambda each: (list(DTYPES).index(each["dtype"]), *place(each)))
        content = {"environment": described, "calls": found}
        out.write_text(json.dumps(content, indent=1) + "\n")
    TABLE.write_text(table())
    return 0


def level_of_this_cpu() -> str | None:
    """Return the set of instructions that kernels are built for, None for another."""
    if target := os.environ.get(cpu_features.CPU_VARIABLE):
        return {"x86-64-v3": "avx2", "x86-64-v4": "avx512"}.get(target)
    if cpu_features.has_tiles():
        return "tiles"
    found = cpu_features.flags()
    return "avx512" if "avx512f" in found else "avx2" if "avx2" in found else None


def file_of(level: str) -> Path:
    """Return the file of a set's measurements."""
    return ROOT / f"benchmarks/results/cpu-dispatch-{level}.json"


def sizes(
    dtypes: list[str], kinds: list[str], most: float
) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield what is measured: a dtype, an activation, features, outputs and rows."""
    for dtype, kind in itertools.product(dtypes, kinds):
        for features, outputs in ACTIVATED_WEIGHTS if kind else WEIGHTS:
            for rows in ACTIVATED_ROWS if kind else ROWS:
                if rows * features * outputs <= most:
                    yield dtype, kind, features, outputs, rows


def place(each: dict[str, Any]) -> tuple[int, int]:
    """Return where a measurement stands among those of its dtype, which stay in their order."""
    weights = [*WEIGHTS, *ACTIVATED_WEIGHTS]
    return list(KINDS).index(each["activation"]), weights.index((each["K"], each["N"]))


def goes(way: str, dtype: torch.dtype) -> None:
    """Have calls go one way from now on: by our product alone, or around PyTorch's."""
    kernels.cpu_way = lambda: FUSED
    kernels.left_to_pytorch = lambda dtype: "all" if way == "around" else None
    chain = library.load()
    assert chain is not None
    kernels.tell(chain)
    # The chain asks for the kernels once; that is not to be timed.
    x = torch.ones(1, 8, dtype=dtype)
    fn.fused_layernorm_linear(x, None, None, x)


def measure(
    rows: int,
    features: int,
    outputs: int,
    dtype: torch.dtype,
    kind: str,
    cache_bytes: int,
    seconds: float,
) -> dict[str, dict[str, float]]:
    """Return microseconds of each way, of a forward and of a step of training."""
    products = 2 * outputs if kind == "swiglu" else outputs
    shapes = (rows, features), (features,), (features,), (products, features), (products,)
    size = dtype.itemsize * (sum(math.prod(shape) for shape in shapes) + rows * products)
    count = min(MOST_SETS, 2 * cache_bytes // size) | 1
    # A model's weights: with larger ones, exponentials run out of normal numbers.
    scales = 1, 1, 1, features**-0.5, 1
    sets = [
        [(torch.randn(shape) * s).to(dtype) for shape, s in zip(shapes, scales, strict=True)]
        for _ in range(count)
    ]
    grad_output = torch.randn(rows, outputs).to(dtype)
    activate, number = KINDS[kind], ACTIVATIONS[kind][0] if kind else 0

    def eager(x: Tensor, *others: Tensor) -> Tensor:
        gamma, beta, weight, bias = others
        return activate(F.linear(F.layer_norm(x, (features,), gamma, beta, EPS), weight, bias))

    def ours(x: Tensor, *others: Tensor) -> Tensor:
        gamma, beta, weight, bias = others
        before, after = (x, None, gamma, beta, *[None] * 7), (0, number, EPS, 0.0, *[False] * 4)
        y: Tensor = found_node.forward(*before, weight, bias, *after)
        return y

    found_node: Any = node.module()

    calls: dict[str, Callable[..., Tensor]] = {
        "eager": eager,
        "fused": ours,
        "around": ours,
    }

    def forward(call: Callable[..., Tensor], i: int) -> None:
        call(*sets[i])

    def train(call: Callable[..., Tensor], i: int) -> None:
        y = call(*sets[i])
        if not kind:
            torch.autograd.grad(y, sets[i], grad_output)

    with torch.inference_mode():
        steps: dict[str, Step] = {
            name: functools.partial(forward, call) for name, call in calls.items()
        }
        found = {"forward": times(steps, count, seconds, dtype)}
    for tensors in sets:
        for tensor in tensors:
            tensor.requires_grad_()
    steps = {name: functools.partial(train, call) for name, call in calls.items()}
    return found | {"training": times(steps, count, seconds, dtype)}


def times(
    steps: dict[str, Step], count: int, seconds: float, dtype: torch.dtype
) -> dict[str, float]:
    """Return the median of each step's calls, which take turns, as their inputs do."""
    found = _times(steps, count, seconds, dtype)
    is_near = abs(found["fused"] / declined(found) - 1) < NEAR
    return _times(steps, count, LONGER * seconds, dtype) if is_near else found


def _times(
    steps: dict[str, Step], count: int, seconds: float, dtype: torch.dtype
) -> dict[str, float]:
    every: dict[str, list[float]] = {name: [] for name in steps}
    quiet: dict[str, list[float]] = {name: [] for name in steps}
    turns = itertools.cycle(range(count))
    for name, step in steps.items():
        goes(name, dtype)
        step(next(turns))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(every["eager"]) < FEWEST:
        for name, step in steps.items():
            turn = next(turns)
            goes(name, dtype)
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


def declined(us: dict[str, float]) -> float:
    """Return the time of what runs without our product, or of eager where that is not measured."""
    return us.get("around", us["eager"])


def table() -> str:
    """Return the Mojo file."""
    rows = []
    for level, name in LEVELS.items():
        for each in json.loads(file_of(level).read_text())["calls"]:
            ways = [
                "FUSED" if us["fused"] <= CLEARLY * declined(us) else "DECLINED"
                for us in each["us"].values()
            ]
            dtype, K, N, M = (f"{each[name]}," for name in ("dtype", "K", "N", "M"))
            activation = f"{NAMES[each['activation']]},"
            rows.append(
                f"{name + ',':7} DType.{dtype:9} {K:5} {N:5} {M:5} {activation:18} "
                f"{ways[0] + ',':9} {ways[1]}"
            )
    return measured_table.text(
        ABOUT,
        IMPORTS,
        "Sizes, and the faster way there.",
        COLUMNS,
        "level   dtype           K     N     M     activation         forward   training",
        rows,
        "set of instructions, type, activation, weight and rows",
    )


if __name__ == "__main__":
    raise SystemExit(main())
