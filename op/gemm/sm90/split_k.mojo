"""A product with long sums and few tiles, both of its operands transposed; and sums of the rows of a.

That is wgrad, with the gradient of the bias. Where its tiles are few, the two
blocks of a cluster share the k blocks of a tile; and where even those fill less
than half of the device, two grids share them: the second overlaps with the first
and adds the sums that the first has left in memory.

Gradients of several weights of the same rows, such as those of q, k and v, have more tiles together than each has.
"""

from std.math import align_up, ceildiv
from std.sys import size_of
from std.utils import StaticTuple

from ...device import Gpu
from ..epilogues import Plain
from ..row_hook import NoHook
from .config import Config
from .launch_matrix import BAND, launch_matrix, launch_parts
from .parts import (
    MOST_PARTS,
    STACKED,
    STACKED_COLUMNS,
    WHOLE,
    Matrices,
    PartSizes,
    steps_of,
)
from .product import Product
from .tiling import count_tiles
from .wgmma import K_BLOCK


# Columns of a tile, and of a tile of several products together, which fills some waves better.
comptime _WIDE = 256
comptime _NARROW = 160
# Cycles of its products, of 1000 that a wide tile's take.
comptime _NARROW_PERMILLE = 1060


def _config(
    split: Bool,
    adds: Bool = False,
    columns: Int = _WIDE,
    parts: Int = WHOLE,
) -> Config:
    return Config.of(
        columns,
        a_transposed=True,
        b_transposed=True,
        sums_rows=True,
        split=split,
        adds=adds,
        parts=parts,
    )


# Up to this length, sums take no longer than storing the products does.
comptime _SHORT = 512
# From this length on, a part takes longer than adding it up does.
comptime _LONG = 2048
# What was measured on an H100 (benchmarks/results/h100-backward-products.json). In the unit of costs, which is what all
# SMs multiply while each takes a k block: the percentage of its products that cuBLAS takes, and its start.
comptime _LIBRARY_PERCENT = 107
comptime _LIBRARY_START = 4
# The percentage that ours takes where several waves share tiles in two, and the start of a second grid.
comptime _SHARED_PERCENT = 111
comptime _GRIDS_START = 8
# A separate pass sums the rows of a at the speed of memory: its elements in a unit, and its start.
comptime _SUMMED = 828_000
comptime _SUMS_START = 5
# Of a k block of a cluster's tiles.
comptime _PRODUCTS = 256 * 256 * K_BLOCK
# Fixed cost per tile, and per doubling of the parts, in k blocks.
comptime _TILE_OVERHEAD = 4
comptime _SPLIT_OVERHEAD = 3


@fieldwise_init
struct SplitK(TrivialRegisterPassable):
    """How the sums are shared."""

    var split: Bool
    """Whether among the blocks of a cluster."""
    var grids: Int
    """Among how many grids."""
    var pays: Bool
    """Whether it is faster than cuBLAS, or the sums are so short that only
    stores count."""
    var workspace_bytes: Int
    """Memory for what the first of two grids leaves."""
    var columns: Int
    """Columns of a tile."""
    var cost: Int
    """What it takes, or cuBLAS where that is faster, in the unit of costs."""

    @staticmethod
    def best(
        m: Int,
        n: Int,
        k: Int,
        processors: Int,
        *,
        sums_rows: Bool,
        adds: Bool = False,
        stacked: Bool = False,
    ) -> Self:
        """Chooses the split whose longest-working cluster has the least to do.

        Args:
            m: Rows of the product.
            n: Columns of the product.
            k: Length of the sums.
            processors: SMs of the device.
            sums_rows: Whether the rows of a are to be summed, for which cuBLAS
                needs a pass more.
            adds: Whether to add to what is there in float32, for which it
                needs another.
            stacked: Whether the rows are those of several products. Their cost is not compared with cuBLAS's,
                which has them one after another.

        Returns:
            The choice.
        """
        var best = Self(False, 1, False, 0, _WIDE, 0)
        var blocks = ceildiv(k, K_BLOCK)
        var clusters = processors // 2
        var least = Int.MAX
        comptime for parts in [1, 2, 4]:
            comptime grids = max(parts // 2, 1)
            var tiles = count_tiles(_config(parts > 1), m, n)
            var waves = ceildiv(tiles * grids, clusters)
            var cost = (
                waves * (ceildiv(blocks, parts) + _TILE_OVERHEAD)
                + (parts // 2) * _SPLIT_OVERHEAD
            )
            # Two grids have to run together.
            var can = parts <= blocks and (parts < 4 or waves == 1)
            if can and cost < least and not (stacked and grids > 1):
                least = cost
                best.split = parts > 1
                best.grids = grids
        if stacked:
            var tiles = count_tiles(_config(False, columns=_NARROW), m, n)
            var length = blocks * _NARROW * _NARROW_PERMILLE // (_WIDE * 1000)
            var cost = ceildiv(tiles, clusters) * (length + _TILE_OVERHEAD)
            if cost < least:
                least = cost
                best.split = False
                best.columns = _NARROW
        var config = _config(best.split)
        var shared = count_tiles(config, m, n) > clusters and best.split
        var ours = least * (_SHARED_PERCENT if shared else 100) // 100
        if best.grids > 1:
            ours += _GRIDS_START
            best.workspace_bytes = m * (n + 1) * 4
        var products = m * n * k // (_PRODUCTS * clusters)
        var library = products * _LIBRARY_PERCENT // 100 + _LIBRARY_START
        if sums_rows:
            library += m * k // _SUMMED + _SUMS_START
        if adds:
            # The product is read, and both read and written in float32.
            library += 5 * m * n // _SUMMED + _SUMS_START
        var parts = best.grids * (2 if best.split else 1)
        best.pays = k <= _SHORT or (
            (parts == 1 or k >= parts * _LONG) and ours <= library
        )
        best.cost = ours if best.pays or stacked else library
        return best


def launch_stacked[
    dtype: DType
](
    gpu: Gpu,
    how: SplitK,
    c: Matrices,
    row_sums: StaticTuple[Int64, MOST_PARTS],
    a: Matrices,
    b: Int,
    sizes: PartSizes,
    n: Int,
    k: Int,
) raises:
    """Queues c_i = a_i @ b^T and the sums of the rows of each a_i, all of which are stored with K first.

    Parameters:
        dtype: Type of all: bfloat16 or float16.

    Args:
        gpu: Where to run.
        how: The choice, for stacked rows.
        c: Where each c is [M_i, N].
        row_sums: Addresses of the sums [M_i], or 0 if they are not wanted.
        a: Where each a is [K, M_i].
        b: Address of b [K, N].
        sizes: Rows of each c, multiples of 8.
        n: Columns of c, a multiple of 8.
        k: Length of the sums, at least 1.

    Raises:
        If the driver refuses.
    """
    var m = steps_of(sizes, STACKED_COLUMNS) * STACKED_COLUMNS
    var product = Product(m, n, k, Plain(), NoHook())
    product.band = BAND
    product.row_sums = row_sums
    product.sizes = sizes
    comptime for split in [False, True]:
        comptime for columns in [_WIDE, _NARROW]:
            comptime if not (split and columns == _NARROW):
                if how.split == split and how.columns == columns:
                    launch_parts[
                        dtype, _config(split, columns=columns, parts=STACKED)
                    ](gpu, c, a, Matrices(b), product)


def launch_split_k[
    dtype: DType, c_dtype: DType
](
    gpu: Gpu,
    how: SplitK,
    c: Int,
    row_sums: Int,
    a: Int,
    b: Int,
    workspace: Int,
    m: Int,
    n: Int,
    k: Int,
    accumulate: Bool,
) raises:
    """Queues c = a @ b^T and the sums of the rows of a, each of which is stored
    with K first.

    Parameters:
        dtype: Type of a and b: bfloat16 or float16.
        c_dtype: Type of c and the sums: `dtype` or float32.

    Args:
        gpu: Where to run.
        how: The choice.
        c: Address of c [M, N].
        row_sums: Address of the sums [M], or 0 if they are not wanted.
        a: Address of a [K, M].
        b: Address of b [K, N].
        workspace: Address of the choice's workspace, a multiple of 16.
        m: Rows of c, a multiple of 8.
        n: Columns of c, a multiple of 8.
        k: Length of the sums, at least 1.
        accumulate: Whether to add to what is there; in float32 only.

    Raises:
        If the driver refuses.
    """
    comptime adds = c_dtype == DType.float32
    var product = Product(m, n, k, Plain(), NoHook())
    product.band = BAND
    product.row_sums[0] = Int64(row_sums)
    product.float32 = Int64(c)
    product.accumulate = Int32(accumulate)
    if not how.split:
        launch_matrix[dtype, _config(False, adds)](gpu, c, a, b, product)
        return
    comptime split = _config(True, adds)
    if how.grids == 1:
        launch_matrix[dtype, split](gpu, c, a, b, product)
        return

    var first_k = align_up(ceildiv(k, 2), K_BLOCK)
    var first = product
    first.k = Int32(first_k)
    product.k = Int32(k - first_k)
    product.follows = 1
    product.accumulate = 1
    comptime if not adds:
        var its_sums = workspace + m * n * 4
        first.accumulate = 0
        first.float32 = Int64(workspace)
        first.row_sums[0] = Int64(its_sums if row_sums != 0 else 0)
        product.float32 = first.float32
        product.float32_row_sums = Int64(its_sums)
    launch_matrix[dtype, _config(True, adds=True)](gpu, 0, a, b, first)
    launch_matrix[dtype, split](
        gpu,
        c,
        a + first_k * m * size_of[dtype](),
        b + first_k * n * size_of[dtype](),
        product,
    )
