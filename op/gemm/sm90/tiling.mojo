"""Chooses the kernel and its shape for the sizes of a product."""

from std.math import ceildiv
from std.sys import size_of

from .config import Config
from .few_tiles import SPLITS, split_of
from .wgmma import K_BLOCK


@fieldwise_init
struct Shape(Equatable, TrivialRegisterPassable):
    """A shape of the matrix kernel."""

    var columns: Int
    """Columns of a tile."""
    var ping_pong: Bool
    """Whether consumers alternate, each with whole tiles."""
    var permille: Int
    """Cycles of its products, of 1000 that tensor cores need: operands of narrow tiles
    come from shared memory and from the L2 cache no faster (docs/hopper-log.md, "Tiles on an H100")."""


comptime SHAPES = [
    Shape(128, True, 1155),
    Shape(128, False, 1155),
    Shape(64, False, 1400),
    Shape(160, True, 1060),
    Shape(192, True, 1015),
    Shape(256, False, 1000),
]
"""Shapes of the matrix kernel. Where a block has one tile, consumers do better to share it."""
comptime COMMON_SHAPES = 3
"""How many of them every product has; the others are for those without an activation, in 16 bits."""
comptime ACTIVATED_SHAPES = [0, 4]
"""Which of them have activations in products without a fold: two of ping-pong."""
comptime BLOCK_SCALED_SHAPES = [SHAPES[1], SHAPES[2]]
"""Which of them scale the sums of blocks of 128 of K: consumers share each tile, whose columns are of one block."""
comptime PROMOTED_SHAPES = [
    Shape(64, False, 2000),
    Shape(128, False, 1240),
    Shape(208, False, 1080),
]
"""Shapes whose sums are added up in float32: consumers share each tile, and have twice the registers of its sums."""
comptime ANY_COLUMNS = Config.of(128, ping_pong=True, any_columns=True)
"""The shape for rows of c that TMA cannot store."""
comptime GATHERING = 5
"""Which of them has a hook that gathers: consumers share its tiles."""
comptime SHARED_COLUMNS = SHAPES[GATHERING].columns
"""Columns of a tile that consumers share where a hook gathers."""
comptime FEW_ROWS = 0
"""In place of a tile's columns, the kernel for few rows."""
comptime MOST_FEW_ROWS = 64
"""Most rows that this kernel takes."""
comptime VERY_FEW_ROWS = 16
"""Most rows where two blocks fit an SM; also the most for grouped products and gates."""
comptime NARROWEST_GATE = 128
"""Fewest columns of a tile where a gate halves them."""
comptime STORE_CYCLES = 4400
"""Cycles in which a warpgroup stores 128 rows of 128 columns."""

# Percentage of the SMs' time that a product has to use to be worth launching.
comptime _FULL_PERCENT = 80
# Where only one block of each cluster has rows, the L2 cache keeps up with the narrowest tiles, and more of them read
# at once.
comptime _NARROWEST = 64
comptime _ALONE_NARROWEST = 1000
comptime _ALONE = 1150


def is_for_few_rows(m: Int, k: Int, most: Int = VERY_FEW_ROWS) -> Bool:
    """Tells whether a product is one for the kernel for few rows.

    Args:
        m: Rows of the product.
        k: Length of the sums, in elements of 16 bits.
        most: Most rows that it is to take.

    Returns:
        Whether it is: the kernel shares the sums between two blocks.
    """
    return m <= most and k > K_BLOCK


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


def percent_used(config: Config, m: Int, n: Int, clusters: Int) -> Int:
    """Estimates how busy the tiles of a product keep the device.

    Args:
        config: Shape of the matrix kernel.
        m: Rows of the product.
        n: Columns of the product.
        clusters: Clusters that run together.

    Returns:
        Percentage of its time: the last wave may be idle in part, and tiles empty.
    """
    var waves = ceildiv(count_tiles(config, m, n), clusters)
    var area = config.cluster_rows() * config.columns
    return 100 * m * n // (waves * clusters * area)


def _cycles[shape: Shape](m: Int, n: Int, k: Int, processors: Int) -> Int:
    """Estimates the cycles that a product takes."""
    comptime config = Config.of(shape.columns, ping_pong=shape.ping_pong)
    comptime store = STORE_CYCLES * shape.columns // 128
    var waves = ceildiv(count_tiles(config, m, n), processors // config.cluster)
    var permille = shape.permille
    if config.cluster * m <= config.cluster_rows():
        comptime if shape.columns == _NARROWEST:
            permille = _ALONE_NARROWEST
        else:
            permille = max(permille, _ALONE)
    var products = ceildiv(k, 16) * shape.columns * permille // 1000
    comptime if shape.ping_pong:
        # One consumer stores while the other multiplies, but for the last tile.
        return waves * max(products, (products + store) // 2) + store
    else:
        return waves * (products + store // 2)


def fewest_cycles(m: Int, n: Int, k: Int, processors: Int) -> Int:
    """Estimates the cycles that a product takes in the shape that suits it best.

    Args:
        m: Rows of the product.
        n: Columns of the product.
        k: Length of the sums.
        processors: SMs of the device.

    Returns:
        The cycles; an estimate for tiles also where the kernel for few rows runs.
    """
    var least = Int.MAX
    comptime for i in range(len(SHAPES)):
        least = min(least, _cycles[SHAPES[i]](m, n, k, processors))
    return least


def gathering_cycles(m: Int, n: Int, k: Int, processors: Int) -> Int:
    """Estimates the cycles that a product takes in the shape that gathers, without what gathering takes.

    Args:
        m: Rows of the product.
        n: Columns of the product.
        k: Length of the sums.
        processors: SMs of the device.

    Returns:
        The cycles.
    """
    return _cycles[SHAPES[GATHERING]](m, n, k, processors)


def activated_tiling[
    dtype: DType
](m: Int, n: Int, k: Int, processors: Int) -> Tiling:
    """Chooses the kernel of a product that is activated.

    Parameters:
        dtype: Type of the operands.

    Args:
        m: Rows of the product.
        n: Columns of the product, those of both halves of a gate.
        k: Length of the sums.
        processors: SMs of the device.

    Returns:
        The shape that takes the fewest cycles; it fills the device if any does.
    """
    # Two elements of 8 bits take the place of one of 16.
    var length = k * size_of[dtype]() // 2
    if is_for_few_rows(m, length):
        return Tiling(FEW_ROWS, False, 100)
    var best = Tiling(0, True, 0)
    var least = Int.MAX
    var most = 0
    comptime for i in ACTIVATED_SHAPES:
        comptime shape = SHAPES[i]
        comptime config = Config.of(shape.columns, ping_pong=True)
        most = max(
            most, percent_used(config, m, n, processors // config.cluster)
        )
        var cycles = _cycles[shape](m, n, length, processors)
        if cycles < least:
            least = cycles
            best.columns = shape.columns
    best.percent = most
    return best


def tiling_with_h[
    dtype: DType
](m: Int, n: Int, k: Int, gates: Bool, processors: Int) -> Tiling:
    """Chooses the kernel of a product whose warps load a tensor of its shape: the input of an activation, whose gradient
    it becomes, or what is added to it.

    Parameters:
        dtype: Type of the operands.

    Args:
        m: Rows of the product.
        n: Columns of the product.
        k: Length of the sums.
        gates: Whether there are two gradients of each sum.
        processors: SMs of the device.

    Returns:
        The shape of `activated_tiling`; for a gate, and of 8 bits, the narrower one, as the wider has no registers for
        both gradients, or for maxima.
    """
    var best = activated_tiling[dtype](m, n, k, processors)
    if (gates or size_of[dtype]() == 1) and best.columns != FEW_ROWS:
        comptime first = ACTIVATED_SHAPES[0]
        comptime config = Config.of(SHAPES[first].columns, ping_pong=True)
        best.columns = config.columns
        best.percent = percent_used(config, m, n, processors // config.cluster)
    return best


def shared_tiling[
    count: Int, //, shapes: Array[Shape, count]
](m: Int, n: Int, k: Int, processors: Int) -> Tiling:
    """Chooses among shapes whose tiles consumers share, of a product of 8 bits.

    Parameters:
        count: How many there are.
        shapes: What it may have.

    Args:
        m: Rows of the product.
        n: Columns of the product.
        k: Length of the sums, in elements of 8 bits.
        processors: SMs of the device.

    Returns:
        The shape that takes the fewest cycles.
    """
    var best = Tiling(0, False, 0)
    var least = Int.MAX
    comptime for shape in shapes:
        comptime config = Config.of(shape.columns)
        # Two elements of 8 bits take the place of one of 16.
        var cycles = _cycles[shape](m, n, k // 2, processors)
        if cycles < least:
            least = cycles
            best.columns = shape.columns
            best.percent = percent_used(
                config, m, n, processors // config.cluster
            )
    return best


struct Tiling(TrivialRegisterPassable):
    """A kernel for products of some sizes."""

    var columns: Int
    """Columns of a tile, or `FEW_ROWS`."""
    var ping_pong: Bool
    """Whether consumers alternate, each with whole tiles."""
    var percent: Int
    """Percentage of the device's time that it uses; 100 if the rows are few."""
    var split: Int
    """Blocks of a cluster that share the sums of a tile; 1 where each block has its own."""

    def __init__(
        out self, columns: Int, ping_pong: Bool, percent: Int, split: Int = 1
    ):
        """Takes a kernel.

        Args:
            columns: Columns of a tile, or `FEW_ROWS`.
            ping_pong: Whether consumers alternate.
            percent: Percentage of the device's time that it uses.
            split: Blocks that share the sums of a tile.
        """
        self.columns = columns
        self.ping_pong = ping_pong
        self.percent = percent
        self.split = split

    def fills(self) -> Bool:
        """Tells whether it keeps the device busy, or the rows are few.

        Returns:
            Whether it does.
        """
        return self.percent >= _FULL_PERCENT

    @staticmethod
    def best(
        m: Int,
        n: Int,
        k: Int,
        processors: Int,
        narrowest: Int = 0,
        *,
        invariant: Bool = False,
        common: Bool = False,
        shared: Bool = False,
        splits: Bool = False,
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
            common: Whether only the shapes that every product has are there.
            shared: Whether consumers have to share each tile.
            splits: Whether the blocks of a cluster may share the sums of a tile.

        Returns:
            The choice.
        """
        if is_for_few_rows(m, k, MOST_FEW_ROWS) and not invariant:
            return Self(FEW_ROWS, False, 100)
        var best = Self(0, False, 0)
        var least = Int.MAX
        comptime for i in range(len(SHAPES)):
            comptime shape = SHAPES[i]
            if shape.columns < narrowest or (common and i >= COMMON_SHAPES):
                continue
            if shared and shape.ping_pong:
                continue
            var cycles = _cycles[shape](m, n, k, processors)
            if cycles < least:
                least = cycles
                comptime config = Config.of(
                    shape.columns, ping_pong=shape.ping_pong
                )
                best = Self(
                    shape.columns,
                    shape.ping_pong,
                    percent_used(config, m, n, processors // config.cluster),
                )
        comptime split_columns = SPLITS[0].columns
        if splits and best.columns == split_columns:
            var split = split_of(m, n, k, processors)
            best.columns = split.columns
            best.split = split.blocks
        return best
