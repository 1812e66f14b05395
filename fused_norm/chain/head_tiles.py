"""How many rows a chunk of the head has on Hopper, and the tiles of the gradient of x.

SMs take tiles in waves, and what is idle in the last wave is lost: at K = 768, the gradient of 4096
rows has tiles of 256 columns for 96 of 132 SMs. A model of waves chooses the width of the tiles,
whether the two blocks of a cluster split the sums of each (split-K), and the rows of a chunk. Its
unit of cost is a cluster's time for 256 rows of one column and a block of 64 of the sums.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

# A cluster is two blocks, whose tiles have 128 rows each; a block of sums has length 64.
_ROWS, _SUMS = 128, 64
# Columns of a tile of the product with the vocabulary (`COLUMNS` in head_sm90.py).
_VOCABULARY_COLUMNS = 192
# Costs: of each wave, in blocks of sums; of splitting sums, once, and over several waves in percent
# (op/gemm/sm90/split_k.mojo).
_WAVE, _SHARING, _SHARED_PERCENT = 4, 3, 111
# The cost of a chunk other than its products: six small kernels, and launches. About 40 us.
_CHUNK = 17_000
# Gains below this are within the model's error, and change nothing.
_LEAST_GAIN = 0.01


class Tile(NamedTuple):
    """A tile of the gradient of x.

    Attributes:
        columns: Its width.
        is_split: Whether both blocks of a cluster compute one tile, each with half of its sums.
        percent: The time of its products, relative to the widest tile's.
    """

    columns: int
    is_split: bool
    percent: float

    def tiles(self, rows: int, K: int) -> int:
        """Return the number of tiles, counted by cluster."""
        of_cluster = _ROWS if self.is_split else 2 * _ROWS
        return -(-rows // of_cluster) * -(-K // self.columns)

    def waves(self, rows: int, K: int, processors: int) -> tuple[int, float]:
        """Return the number of waves, and the fraction of them that is busy."""
        clusters = max(processors // 2, 1)
        waves = -(-self.tiles(rows, K) // clusters)
        of_cluster = _ROWS if self.is_split else 2 * _ROWS
        return waves, rows * K / (waves * clusters * of_cluster * self.columns)

    def cost(self, rows: int, K: int, V: int, processors: int) -> float:
        """Return the cost of the gradient of some rows."""
        waves = self.waves(rows, K, processors)[0]
        sums, percent, sharing = -(-V // _SUMS), self.percent, 0
        if self.is_split:
            sums, sharing = -(-sums // 2), _SHARING
            percent = percent * _SHARED_PERCENT / 100 if waves > 1 else percent
        return self.columns * (waves * (sums * percent / 100 + _WAVE) + sharing)


# The tiles of op/head/input_gradient.mojo; their relative times are in op/gemm/sm90/tiling.mojo.
TILES = (
    Tile(256, False, 100),
    Tile(192, False, 102.5),
    Tile(256, True, 100),
    Tile(192, True, 102.5),
)


@functools.lru_cache
def best_tile(rows: int, K: int, V: int, processors: int) -> Tile:
    """Return the fastest tile for the gradient of some rows.

    Args:
        rows: The number of rows.
        K: Their features.
        V: Size of the vocabulary.
        processors: SMs of the device.
    """
    # Each of two blocks needs some of the sums.
    can = [tile for tile in TILES if not tile.is_split or V > _SUMS]
    return min(can, key=lambda tile: tile.cost(rows, K, V, processors))


@functools.lru_cache
def rows_of_chunk(M: int, K: int, V: int, most: int, processors: int) -> int:
    """Return the rows of a chunk for which all products together are fastest.

    Args:
        M: All rows, at least 1.
        K: Features.
        V: Size of the vocabulary.
        most: Most rows of a chunk.
        processors: SMs of the device.
    """
    clusters, of_cluster = max(processors // 2, 1), 2 * _ROWS

    def cost(rows: int) -> float:
        of_logits = -(-rows // of_cluster) * -(-V // _VOCABULARY_COLUMNS)
        # The gradient of the weight has enough tiles for partial waves not to matter.
        of_weight = V * K / (of_cluster * clusters) * -(-rows // _SUMS)
        return (
            -(-of_logits // clusters) * _VOCABULARY_COLUMNS * -(-K // _SUMS)
            + best_tile(rows, K, V, processors).cost(rows, K, V, processors)
            + of_weight
            + _CHUNK
        )

    def total(rows: int) -> float:
        whole, left = divmod(M, rows)
        return whole * cost(rows) + (cost(left) if left else 0)

    # As few chunks as possible, of equal size; or down to half as many rows, if they fill clusters.
    alike = -(-M // -(-M // most))
    others = range(alike // of_cluster * of_cluster, alike // 2, -of_cluster)
    best = min(others, key=total, default=alike)
    return best if best and total(best) < (1 - _LEAST_GAIN) * total(alike) else alike
