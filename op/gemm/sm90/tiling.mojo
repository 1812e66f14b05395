"""Which kernel suits the sizes of a product, in which shape."""

from std.math import ceildiv

from .config import Config
from .wgmma import K_BLOCK

comptime TILE_COLUMNS = [256, 128, 64]
"""Shapes of the matrix kernel, by the columns of a tile."""
comptime FEW_ROWS = 0
"""In place of those, the kernel for few rows."""
comptime MOST_FEW_ROWS = 64
"""Most rows that this kernel takes."""
comptime NARROWEST_GATE = 128
"""Fewest columns of a tile where a gate halves them."""

# Fixed cost per tile, in columns.
comptime _TILE_OVERHEAD = 16
# Percentage of the SMs' time that a product has to use to be worth launching.
comptime _FULL_PERCENT = 80


def count_tiles(config: Config, m: Int, n: Int) -> Int:
    """Counts the tiles of a product.

    Args:
        config: Shape of the matrix kernel.
        m: Rows of the product.
        n: Columns of the product.

    Returns:
        How many tiles clusters compute.
    """
    return ceildiv(m, config.cluster_rows()) * ceildiv(n, config.columns)


def fills(config: Config, m: Int, n: Int, clusters: Int) -> Bool:
    """Tells whether the tiles of a product keep the device busy.

    Args:
        config: Shape of the matrix kernel.
        m: Rows of the product.
        n: Columns of the product.
        clusters: Clusters that run together.

    Returns:
        Whether little of the last wave is idle and of the tiles is empty.
    """
    var waves = ceildiv(count_tiles(config, m, n), clusters)
    var area = config.cluster_rows() * config.columns
    return 100 * m * n >= _FULL_PERCENT * waves * clusters * area


@fieldwise_init
struct Tiling(TrivialRegisterPassable):
    """A kernel for products of some sizes."""

    var columns: Int
    """Columns of a tile, or `FEW_ROWS`."""
    var fills: Bool
    """Whether it keeps the device busy, or the rows are few."""

    @staticmethod
    def best(
        m: Int,
        n: Int,
        k: Int,
        processors: Int,
        narrowest: Int = 0,
        *,
        invariant: Bool = False,
    ) -> Self:
        """Chooses the shape whose longest-working cluster has the least to do.

        Args:
            m: Rows of the product.
            n: Columns of the product.
            k: Length of the sums.
            processors: SMs of the device.
            narrowest: Fewest columns of a tile.
            invariant: Whether sums have to run in the same order for any m.
                They do in tiles of every shape: k block after k block.

        Returns:
            The choice.
        """
        # The kernel for few rows shares the sums between two blocks.
        if m <= MOST_FEW_ROWS and k > K_BLOCK and not invariant:
            return Self(FEW_ROWS, True)
        var best = Self(0, False)
        var least = Int.MAX
        comptime for i in range(len(TILE_COLUMNS)):
            comptime config = Config.of(TILE_COLUMNS[i])
            if config.columns < narrowest:
                continue
            var clusters = processors // config.cluster
            var waves = ceildiv(count_tiles(config, m, n), clusters)
            var cost = waves * (config.columns + _TILE_OVERHEAD)
            if cost < least:
                least = cost
                best = Self(config.columns, fills(config, m, n, clusters))
        return best
