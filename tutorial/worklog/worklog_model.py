"""What the worklog's steps should take by a model, in cycles, at the headline's sizes."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

from benchmarks import markdown
from tutorial.worklog.worklog_steps import HEADLINE, STEPS

M, K, N = HEADLINE
SMS = 132
# Of a block, and multiply-adds of an SM in a cycle: of tensor cores in bfloat16, in float32.
TILE = (128, 256)
TENSOR, FLOAT32 = 2048, 128
# Nsight Compute counts these for cuBLAS's kernel (docs/hopper-log.md, "The two bounds").
CUBLAS = 559_000
# Cycles in which two warpgroups store a tile by TMA, and one a tile of 128 columns of its own.
STORE = 4400
# Tiles of 192 columns take as much longer: op/gemm/sm90/tiling.mojo.
NARROW = 1.015
# Their columns.
PING_PONG = 192


class Model(NamedTuple):
    """A prediction.

    Attributes:
        cycles: Of an SM, for all of its tiles.
        why: How they are counted.
    """

    cycles: float
    why: str


def _tiles(columns: int) -> int:
    """Return the tiles of the SM that has most; its cluster takes pairs of rows of tiles."""
    return ceil(M // (2 * TILE[0]) * ceil(N / columns) / (SMS // 2))


def models(bytes_per_cycle: float) -> dict[str, Model]:
    """Return the predictions by step.

    Args:
        bytes_per_cycle: Of a copy in memory.
    """
    tiles, products = _tiles(TILE[1]), TILE[0] * TILE[1] * K / TENSOR
    shared = tiles * (products + STORE)
    ping_pong = (_tiles(PING_PONG) * products * NARROW + 2 * STORE) * PING_PONG / TILE[1]
    reads = 2 * M * K / bytes_per_cycle
    return {
        "tiled": Model(M * N * K / SMS / FLOAT32, "128 multiply-adds in float32 a cycle"),
        "tensor-cores": Model(tiles * 2 * products, "products, and copies that take as long"),
        "ring": Model(tiles * products, "products alone"),
        "clusters": Model(tiles * products, "products alone"),
        "no-spills": Model(shared, f"and {STORE:,} cycles to store each tile"),
        "epilogue": Model(shared + reads, "and a read of x by the kernel for statistics"),
        "statistics": Model(shared, "as step 6"),
        "ping-pong": Model(ping_pong + reads, "one store is left, and the read of x"),
    }


def table(data: dict[str, Any]) -> str:
    """Return measured and predicted cycles of each step.

    Args:
        data: The rows of the page's table, and the machine's ceiling.
    """
    # A copy's rate at the clock at which cuBLAS takes its cycles, where that was measured.
    known = {row["name"]: row for row in data["table"] if row["of_cublas"]}
    if "no-spills" not in known:
        return "Cycles: not measured yet.\n"
    microseconds = known["no-spills"]["cublas_us"]
    predicted = models(data["ceiling"]["bytes_per_second"] * microseconds / 1e6 / CUBLAS)
    rows = []
    for step in STEPS:
        if step.name not in predicted:
            continue
        cycles = (
            f"{CUBLAS / known[step.name]['of_cublas'] / 1e3:.0f}" if step.name in known else "–"
        )
        model = predicted[step.name]
        cells = [cycles, f"{model.cycles / 1e3:.0f}", model.why]
        rows.append([str(step.number), step.name, *cells])
    header = ["#", "step", "measured, thousands", "model, thousands", "the model counts"]
    return markdown.table(header, rows, right=(0, 2, 3))
