"""The terms of the cost model of forwards on Hopper: what a forward's time consists of."""

from std.math import ceildiv
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.utils import StaticTuple

from ...gemm.sm90.config import TILE_ROWS, Config
from ...gemm.sm90.few_rows.layout import FEW_CLUSTER, FEW_OUTPUTS
from ...gemm.sm90.tiling import (
    MOST_FEW_ROWS,
    VERY_FEW_ROWS,
    Tiling,
    count_tiles,
    fewest_cycles,
)
from ...python import Arguments, Values, integer

comptime TERMS = 8
"""How many there are."""

# PyTorch's product splits sums that are longer between tiles, up to as many rows as have other kernels.
comptime _LONGEST_SUM = 2048
# Elements of a weight from which on it is read as fast as memory can.
comptime _LARGE_WEIGHT = 1 << 20
# Rows and columns of PyTorch's usual tiles.
comptime _LIBRARY_TILE = 128
# Elements of a sector of 32 bytes, which memory is read by.
comptime _SECTOR = 16


def terms(
    m: Int, k: Int, n: Int, processors: Int, is_library: Bool
) -> StaticTuple[Int, TERMS]:
    """Counts what a forward's time consists of: the costs multiply these.

    Args:
        m: Rows.
        k: Features.
        n: Outputs.
        processors: SMs of the device.
        is_library: Whether the product is PyTorch's.

    Returns:
        Its launches, the elements of x, of the weight and of y, then what is the product's own.
    """
    var found = StaticTuple[Int, TERMS](fill=0)
    found[0] = 1
    found[1] = m * k
    found[2] = k * n
    found[3] = m * n
    if m <= MOST_FEW_ROWS:
        if is_library:
            found[4] = k
            found[5] = min(k, _LONGEST_SUM)
            found[6] = min(k * n, _LARGE_WEIGHT)
            return found
        # One cluster computes a tile.
        found[4] = ceildiv(ceildiv(n, FEW_OUTPUTS), processors // FEW_CLUSTER)
        found[5] = found[4] * k
        # Of more rows, only one block fits an SM, and less of the weight is on its way.
        if m > VERY_FEW_ROWS:
            found[6] = k * n
        if k % _SECTOR != 0:
            found[7] = k * n
        return found
    # At the limit of its power, a GPU lowers its clock.
    found[4] = m * k * n
    if is_library:
        found[5] = m
        # Where the tiles fill less than half of the device, a tile takes as long as its sums.
        var tiles = ceildiv(m, _LIBRARY_TILE) * ceildiv(n, _LIBRARY_TILE)
        if tiles <= processors // 2:
            found[6] = k
        return found
    found[5] = fewest_cycles(m, n, k, processors)
    # Boxes that lie outside the matrix in part are slow to fill.
    if m % TILE_ROWS != 0:
        var config = Config.of(Tiling.best(m, n, k, processors).columns)
        var loaded = config.cluster_rows() + config.columns
        found[6] = count_tiles(config, m, n) * loaded * k
    # So are those of rows that start inside a sector.
    if k % _SECTOR != 0:
        found[7] = found[5]
    return found


def term(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Returns what a cost is multiplied by.

    Args:
        module: The extension.
        values: M, K, N, the device's SMs, 0 for our product or 1 for PyTorch's, and the cost's place.
        count: 6.

    Returns:
        An integer.
    """
    var arguments = Arguments(values)
    var m = arguments.integer()
    var k = arguments.integer()
    var n = arguments.integer()
    var processors = arguments.integer()
    var found = terms(m, k, n, processors, arguments.integer() != 0)
    return integer(found[arguments.integer()])
