"""Which kernel suits the sizes of a product, in which shape."""

from std.math import ceildiv

from .config import Config
from .wgmma import K_BLOCK


@fieldwise_init
struct Shape(Equatable, TrivialRegisterPassable):
    """A shape of the matrix kernel."""

    var columns: Int
    """Columns of a tile."""
    var takes_turns: Bool
    """Whether each consumer has whole tiles, in turn."""


comptime SHAPES = [Shape(128, True), Shape(128, False), Shape(64, False)]
"""Shapes of the matrix kernel. Where a block has one tile, consumers do better to share it."""
comptime SHARED_COLUMNS = 256
"""Columns of a tile that consumers share where they gather on the way, too."""
comptime FEW_ROWS = 0
"""In place of a tile's columns, the kernel for few rows."""
comptime MOST_FEW_ROWS = 64
"""Most rows that this kernel takes."""
comptime NARROWEST_GATE = 128
"""Fewest columns of a tile where a gate halves them."""

# Cycles in which a warpgroup stores 128 rows of 128 columns.
comptime _STORE = 4400
# Percentage of the cycles of products that tiles of 64 columns take: the tensor cores wait for shared memory.
comptime _NARROW_PERCENT = 115
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


def _cycles(config: Config, m: Int, n: Int, k: Int, processors: Int) -> Int:
    """Estimates the cycles that a product takes."""
    var waves = ceildiv(count_tiles(config, m, n), processors // config.cluster)
    var products = ceildiv(k, 16) * config.columns
    if config.takes_turns:
        # One consumer stores while the other multiplies, but for the last tile.
        return waves * max(products, (products + _STORE) // 2) + _STORE
    if config.columns == 64:
        products = products * _NARROW_PERCENT // 100
    return waves * (products + _STORE * config.columns // 256)


@fieldwise_init
struct Tiling(TrivialRegisterPassable):
    """A kernel for products of some sizes."""

    var columns: Int
    """Columns of a tile, or `FEW_ROWS`."""
    var takes_turns: Bool
    """Whether each consumer has whole tiles."""
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
        """Chooses the shape that takes the fewest cycles.

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
            return Self(FEW_ROWS, False, True)
        var best = Self(0, False, False)
        var least = Int.MAX
        comptime for i in range(len(SHAPES)):
            comptime shape = SHAPES[i]
            comptime config = Config.of(
                shape.columns, takes_turns=shape.takes_turns
            )
            if config.columns < narrowest:
                continue
            var cycles = _cycles(config, m, n, k, processors)
            if cycles < least:
                least = cycles
                var clusters = processors // config.cluster
                best = Self(
                    config.columns,
                    config.takes_turns,
                    fills(config, m, n, clusters),
                )
        return best
