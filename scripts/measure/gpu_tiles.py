"""Measure products of the Hopper kernel in each shape of its tiles, and PyTorch's, on this GPU.

    python scripts/measure/gpu_tiles.py [--few] [--commit COMMIT] [--limit SECONDS] [--out FILE]

What op/gemm/sm90/tiling.mojo chooses by is judged by these: each shape with a bias ("bias"), with
the terms of a folded norm ("scale"), with those terms and the statistics gathered ("gathered"),
with an added tensor ("add"), and with b stored as [K, N] ("transposed"), as dgrad reads a weight.
With --few, products with a bias that have few tiles, or tiles that end past the matrix, and also
those whose sums the blocks of a cluster share.
All products of a size are interleaved, in a new order each round; microseconds are medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import document, environment
from fused_norm.devices.machine import hopper_kind
from fused_norm.native import build
from fused_norm.tuning.sizes import SEED, draw_for_gpu

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
TILING = (ROOT / "op/gemm/sm90/tiling.mojo").read_text()
FEW_TILES = (ROOT / "op/gemm/sm90/few_tiles.mojo").read_text()
LISTED = re.search(r"^comptime SHAPES = \[(.*?)^\]", TILING, re.DOTALL | re.MULTILINE)
SHAPES = re.findall(r"Shape\((\d+), (True|False)", LISTED[1] if LISTED else "")
TILES = [(int(n), p == "True", 1) for n, p in SHAPES]
SPLITS = [
    (int(n), False, int(blocks)) for n, blocks in re.findall(r"Split\((\d+), (\d+),", FEW_TILES)
]
# Columns, whether consumers alternate, and how many blocks share the sums.
Tile = tuple[int, bool, int]
# As tests/mojo/sm90_shapes.mojo counts its products; one shape gathers statistics.
KINDS = {"transposed": 0, "bias": 1, "add": 4, "scale": 5, "gathered": 6}
GATHERING = [(256, False, 1)]
ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
WEIGHTS = (
    *((4096, 4096), (1024, 1024), (768, 2304), (768, 3072), (3072, 768), (4096, 12288)),
    *((2048, 2048), (2048, 8192), (8192, 2048), (1024, 4096), (4096, 1024), (1280, 5120)),
    *((5120, 1280), (4096, 14336), (14336, 4096), (1024, 3072), (1152, 4608), (11008, 4096)),
)
RANDOM = 80
FEW = (
    *((128, K, 128) for K in (256, 512, 1024, 2048, 8192)),
    *((192, 920, 64), (228, 1160, 344), (201, 712, 128), (372, 584, 128), (143, 10648, 16)),
    *((875, 8192, 208), (367, 12464, 768), (367, 2048, 1328), (547, 1024, 1280)),
    *((M, 4096, 1024) for M in (128, 256, 512, 1024)),
    *((M, 4096, 4096) for M in (65, 80, 128)),
    *((M, 4096, 64) for M in (4096, 8192)),
    *((512, 2048, 256), (1024, 4096, 128), (2048, 2048, 64), (80, 8192, 1024), (300, 5120, 640)),
    *((1000, 16384, 64), (400, 14336, 1024), (150, 6144, 2048), (1024, 8192, 512)),
    *((512, 11008, 512), (256, 2048, 512), (96, 2560, 2560), (80, 2048, 2048)),
    *((197, 768, N) for N in (768, 2304, 3072)),
    *((577, 1024, 1024), (1024, 1024, 1024), (640, 640, 640), (256, 1024, 1024)),
    *((278, 2960, 8192), (1100, 4096, 4096), (1231, 5120, 1288), (16448, 1024, 1024)),
)
# Of which a graph consists, and how often each is replayed at least.
CALLS, ROUNDS = 8, 7
BACKLOG_CYCLES = 200_000


def main() -> int:
    """Measure, write the file and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--commit")
    parser.add_argument("--limit", type=float, default=120, help="seconds of all (default: 120)")
    parser.add_argument("--few", action="store_true", help="few tiles, and those that share sums")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("SKIPPED: needs a Hopper GPU")
        return 0
    accelerator = build.accelerator_of(torch.device("cuda", 0))
    name = build.DTYPES[torch.bfloat16]
    module = build.load(build.Extension("sm90_shapes", name, accelerator, ROOT / "tests/mojo"))
    rows, end = [], time.perf_counter() + options.limit
    kinds = ["bias"] if options.few else list(KINDS)
    tiles = TILES + SPLITS if options.few else TILES
    for M, K, N in FEW if options.few else sizes():
        if time.perf_counter() > end:
            print("the limit is reached")
            break
        us = measure(module, M, K, N, kinds, tiles)
        rows.append([M, K, N, us])
        best = {k: min((t, n) for n, t in us.items() if n.startswith(k)) for k in kinds}
        cells = ", ".join(f"{n} {t:.1f}" for t, n in best.values())
        print(f"{M}x{K}x{N}: library {us['library']:.1f}, {cells}", flush=True)
    name = f"gpu-{'few-' if options.few else ''}tiles-{hopper_kind(0)}.json"
    path = options.out or RESULTS / name
    write(path, options.commit, rows)
    return 0


def sizes() -> list[tuple[int, int, int]]:
    """Return what is measured: sizes of models, then random ones of more rows than 64."""
    grid = [(M, K, N) for (K, N), M in itertools.product(WEIGHTS, ROWS)]
    drawn = [(s.M, s.K, s.N) for s in draw_for_gpu(4 * RANDOM, SEED, ["bfloat16"])]
    fitting = [s for s in drawn if s[0] > 64 and s[1] % 64 == 0 and s[2] % 8 == 0]
    turns = itertools.zip_longest(grid, fitting[:RANDOM])
    return [size for turn in turns for size in turn if size is not None]


def measure(
    module: ModuleType, M: int, K: int, N: int, kinds: Sequence[str], tiles: Sequence[Tile]
) -> dict[str, float]:
    """Return the microseconds of a product by kind and shape, and of PyTorch's."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, w, bias, added = normal(M, K), normal(N, K) * K**-0.5, normal(N), normal(M, N)
    y, turned = torch.empty_like(added), w.t().contiguous()
    vector, corrections = torch.randn(2, N, device="cuda")
    mean, rstd = torch.randn(2, M, device="cuda")
    stream = torch.cuda.Stream()
    launcher = module.new_launcher(0, stream.cuda_stream, 1)

    def ours(kind: str, tile: Tile) -> Callable[[], object]:
        b = turned if kind == "transposed" else w
        constants = vector if kind in ("scale", "gathered") else bias
        tensors = (constants, added, corrections, mean, rstd)
        pointers = [t.data_ptr() for t in tensors]
        places = (y.data_ptr(), x.data_ptr(), b.data_ptr())
        return lambda: module.product(
            launcher, *tile, KINDS[kind], *places, M, N, K, *pointers, 0, 0
        )

    calls: dict[str, Callable[[], object]] = {"library": lambda: F.linear(x, w, bias)}
    for kind, tile in itertools.product(kinds, tiles):
        columns, turns, blocks = tile
        exists = tile in GATHERING or kind != "gathered"
        if exists and 64 * (blocks - 1) < K:
            shared = f" in {blocks}" if blocks > 1 else ""
            calls[f"{kind} {columns}{'p' if turns else ''}{shared}"] = ours(kind, tile)
    with torch.cuda.stream(stream):
        replays = {name: captured(call, stream) for name, call in calls.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for _ in range(ROUNDS):
            random.shuffle(names)
            for name in names:
                found[name].append(replays[name]())
    return {name: round(statistics.median(each), 2) for name, each in found.items()}


def captured(call: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], float]:
    """Return what replays a graph of calls and returns the microseconds of one."""
    call()
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()

    def us() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BACKLOG_CYCLES)
        start.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / CALLS

    return us


def write(path: Path, commit: str | None, rows: list[list[Any]]) -> None:
    """Write measurements."""
    device = torch.device("cuda", torch.cuda.current_device())
    described = dataclasses.asdict(environment.describe(device, commit))
    head = {"environment": described, "fields": ["M", "K", "N", "us"]}
    document.write_rows(path, head, "products", rows)


if __name__ == "__main__":
    raise SystemExit(main())
