"""Chooses how the blocks of a cluster share the sums of a forward's tiles, where those are few and their sums long.

What was measured is in docs/hopper-log.md, "Few tiles".
"""

from std.math import ceildiv

from .config import ROW_ALIGNMENT, TILE_ROWS
from .wgmma import K_BLOCK

# Bytes that the L2 cache gives all SMs in a cycle where tiles share sums, and elements of a sector of memory.
comptime _L2_BYTES = 7400
comptime _SECTOR = 16
# What sharing a tile's sums has to gain.
comptime _SPLIT_PERCENT = 110


@fieldwise_init
struct Split(Equatable, TrivialRegisterPassable):
    """A shape of the matrix kernel in which the blocks of a cluster share the sums of a tile."""

    var columns: Int
    """Columns of a tile."""
    var blocks: Int
    """Blocks of a cluster."""
    var of_block: Int
    """Cycles in which one of them loads and multiplies a k block."""
    var cycles: Int
    """Cycles in which they exchange sums and each stores its share, more than one that stores the narrowest tile."""

    def block_cycles(self, k: Int, at_once: Int) -> Int:
        """Counts the cycles of a k block, as long as its products or what all SMs load.

        Args:
            k: Length of the sums.
            at_once: Blocks that load at one time.

        Returns:
            The cycles.
        """
        var own = self.of_block
        var loaded = 2 * K_BLOCK * (TILE_ROWS + self.columns)
        # Boxes of rows that start inside a sector are slow to fill, and take two lines of a cache for each.
        if k % _SECTOR != 0:
            own = own * 3 // 2
            loaded *= 2
        elif k % K_BLOCK != 0:
            loaded = loaded * 3 // 2
        return max(own, at_once * loaded // _L2_BYTES)


comptime SPLITS = [
    Split(64, 2, 270, 1900),
    Split(64, 4, 270, 2350),
    Split(128, 2, 530, 3900),
]
"""Which there are of products in 16 bits with a bias or without, whose tiles are few and whose sums are long."""


def split_of(m: Int, n: Int, k: Int, processors: Int) -> Split:
    """Chooses how the blocks of a cluster share the sums of each tile, where the narrowest tiles are a wave or less.

    Args:
        m: Rows of the product.
        n: Columns of the product.
        k: Length of the sums.
        processors: SMs of the device.

    Returns:
        One of `SPLITS`, or one of a single block.
    """
    comptime narrow = SPLITS[0]
    var best = Split(narrow.columns, 1, narrow.of_block, 0)
    # Threads store rows that TMA cannot, of whole tiles.
    if n * 2 % ROW_ALIGNMENT != 0:
        return best
    var tiles = ceildiv(m, TILE_ROWS) * ceildiv(n, narrow.columns)
    if tiles > processors:
        return best
    var blocks = ceildiv(k, K_BLOCK)
    var least = blocks * best.block_cycles(k, tiles)
    comptime for i in range(len(SPLITS)):
        comptime split = SPLITS[i]
        tiles = ceildiv(m, TILE_ROWS) * ceildiv(n, split.columns)
        # A cluster is within a GPC, some of which have SMs that are not enough for another one of four.
        comptime whole = 8 if split.blocks == 2 else 7
        if (
            tiles <= processors * whole // 8 // split.blocks
            and split.blocks <= blocks
        ):
            var cycles = split.cycles + ceildiv(
                blocks, split.blocks
            ) * split.block_cycles(k, tiles * split.blocks)
            if cycles * _SPLIT_PERCENT // 100 < least:
                least = cycles
                best = split
    return best
