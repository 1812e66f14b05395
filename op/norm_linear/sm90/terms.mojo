"""The terms of the cost model of forwards on Hopper: what a forward's time consists of."""

from std.math import ceildiv
from std.python._cpython import Py_ssize_t, PyObjectPtr
from std.utils import StaticTuple

from ...gemm.sm90.config import TILE_ROWS, Config
from ...gemm.sm90.few_rows.layout import FEW_CLUSTER, FEW_OUTPUTS
from ...gemm.sm90.few_tiles import SPLITS
from ...gemm.sm90.tiling import (
    MOST_FEW_ROWS,
    STORE_CYCLES,
    VERY_FEW_ROWS,
    Tiling,
    count_tiles,
    is_for_few_rows,
)
from ...gemm.sm90.wgmma import K_BLOCK
from ...python import Arguments, Values, integer

comptime TERMS = 8
"""How many there are."""
comptime BEHIND_PASS = 0
"""Our product of rows that a pass has normalized."""
comptime LIBRARY = 1
"""PyTorch's product of such rows."""
comptime OF_FOLD = 2
"""Our product of a folded weight."""
comptime IN_FLOAT32 = 3
"""Our product of rows that a pass has normalized, as tf32: it has the common tiles alone."""
comptime TILES = 2
"""The set of costs of tiles, behind those of the kernels for very few and for few rows."""
comptime ROW_SETS = 3
"""How many sets of costs there are."""

# PyTorch's product splits sums that are longer between tiles.
comptime _LONGEST_SUM = 2048
# Elements of a weight from which on it is read as fast as memory can.
comptime _LARGE_WEIGHT = 1 << 20
# Rows and columns of PyTorch's usual tiles, and columns that are stored together.
comptime _LIBRARY_TILE = 128
comptime _LIBRARY_COLUMNS = 64
# Products from which on the limit of power slows them down.
comptime _POWER_LIMIT = 1 << 34
# Elements of a sector of 32 bytes, which memory is read by.
comptime _SECTOR = 16
# Elements that the warp of a row reads together.
comptime _ROW_STEP = 256
# Bytes that the L2 cache gives all SMs in a cycle.
comptime _L2_BYTES = 6000


def row_set(m: Int, k: Int) -> Int:
    """Finds which set of costs a forward has.

    Args:
        m: Rows.
        k: Features.

    Returns:
        Its place, below `ROW_SETS`.
    """
    if is_for_few_rows(m, k, VERY_FEW_ROWS):
        return 0
    return 1 if is_for_few_rows(m, k, MOST_FEW_ROWS) else TILES


def terms(
    m: Int, k: Int, n: Int, processors: Int, product: Int
) -> StaticTuple[Int, TERMS]:
    """Counts what a forward's time consists of: the costs multiply these.

    Args:
        m: Rows.
        k: Features.
        n: Outputs.
        processors: SMs of the device.
        product: `BEHIND_PASS`, `LIBRARY`, `OF_FOLD` or `IN_FLOAT32`.

    Returns:
        Its launches, then what passes and the product take.
    """
    var found: StaticTuple[Int, TERMS]
    if row_set(m, k) == TILES:
        if product == LIBRARY:
            found = _of_library(m, k, n, processors)
        else:
            found = _of_tiles(m, k, n, processors, product)
    else:
        found = _of_few_rows(m, k, n, processors, product == LIBRARY)
    return terms_of_fold(found, m, k, n) if product == OF_FOLD else found


def terms_of_fold(
    behind_pass: StaticTuple[Int, TERMS], m: Int, k: Int, n: Int
) -> StaticTuple[Int, TERMS]:
    """Counts what a forward with a fold takes: its product has the same tiles as one behind a pass.

    Args:
        behind_pass: The terms of that.
        m: Rows.
        k: Features.
        n: Outputs.

    Returns:
        Its terms.
    """
    var found = behind_pass
    if row_set(m, k) == TILES:
        # A warp waits for each row of statistics.
        found[2] = m
        found[3] = k * n
    elif k % K_BLOCK == 0:
        # Rows whose statistics are gathered take longer than those that only are multiplied.
        found[7] = found[6]
    return found


def _in_tiles(m: Int, k: Int, n: Int) -> StaticTuple[Int, TERMS]:
    """Counts what all products of many rows take."""
    var found = StaticTuple[Int, TERMS](fill=0)
    found[0] = 1
    # At the limit of its power, a GPU lowers its clock.
    found[1] = max(0, m * k * n - _POWER_LIMIT)
    # A warp waits for each row; a pass writes rows as well, and reads keep it busy.
    found[2] = m * ceildiv(k, _ROW_STEP) * _ROW_STEP
    return found


def _of_library(
    m: Int, k: Int, n: Int, processors: Int
) -> StaticTuple[Int, TERMS]:
    var found = _in_tiles(m, k, n)
    found[3] = k * n
    # Where the tiles fill less than half of the device, a tile takes as long as its sums, which may be split.
    var tiles = ceildiv(m, _LIBRARY_TILE) * ceildiv(n, _LIBRARY_TILE)
    if tiles <= processors // 2:
        found[4] = min(k, _LONGEST_SUM)
    found[5] = m * ceildiv(n, _LIBRARY_COLUMNS) * _LIBRARY_COLUMNS
    if n % _SECTOR != 0:
        found[6] = m * n
    found[7] = m * k * n
    return found


def _of_tiles(
    m: Int, k: Int, n: Int, processors: Int, product: Int
) -> StaticTuple[Int, TERMS]:
    var found = _in_tiles(m, k, n)
    var tiling = Tiling.best(
        m,
        n,
        k,
        processors,
        common=product == IN_FLOAT32,
        splits=product == BEHIND_PASS,
    )
    var config = Config.of(tiling.columns, ping_pong=tiling.ping_pong)
    var clusters = processors // config.cluster
    var tiles = count_tiles(config, m, n)
    var waves = ceildiv(tiles, clusters)
    found[4] = _cycles(config, k, waves, min(tiles, clusters))
    var longest = k
    comptime for i in range(len(SPLITS)):
        comptime split = SPLITS[i]
        if (tiling.columns, tiling.split) == (split.columns, split.blocks):
            # Of a cluster's two tiles, each has a cluster of its own.
            tiles = ceildiv(m, TILE_ROWS) * ceildiv(n, split.columns)
            waves = 1
            longest = ceildiv(k, split.blocks)
            # As much again as a block that stores the narrowest tile.
            found[4] = STORE_CYCLES // 4 + split.cycles
            found[4] += ceildiv(longest, K_BLOCK) * (
                split.block_cycles(k, tiles * split.blocks)
            )
    found[5] = n
    if waves == 1:
        found[6] = longest
    # Boxes of rows that start inside a sector are slow to fill.
    if k % _SECTOR != 0:
        found[7] = tiles * (config.cluster_rows() + config.columns) * longest
    return found


def _of_few_rows(
    m: Int, k: Int, n: Int, processors: Int, library: Bool
) -> StaticTuple[Int, TERMS]:
    var found = StaticTuple[Int, TERMS](fill=0)
    found[0] = 1
    found[1] = n
    found[2] = k * n
    found[3] = min(k, _LONGEST_SUM)
    if k % _SECTOR != 0:
        found[4] = k * n
    if library:
        found[5] = k
        found[6] = min(k * n, _LARGE_WEIGHT)
        return found
    # One cluster computes a tile.
    found[5] = ceildiv(ceildiv(n, FEW_OUTPUTS), processors // FEW_CLUSTER)
    found[6] = found[5] * k
    return found


def _cycles(config: Config, k: Int, waves: Int, at_once: Int) -> Int:
    """Estimates the cycles of tiles, each as long as its products or what it loads."""
    # Of what tensor cores can do, products are 87 %.
    var products = ceildiv(k, 16) * config.columns * 115 // 100
    var loaded = 2 * K_BLOCK * (config.cluster_rows() + config.columns)
    var loads = at_once * k * loaded // (K_BLOCK * _L2_BYTES)
    var cycles = max(products, loads)
    var store = STORE_CYCLES * config.columns // 128
    if config.ping_pong:
        # One consumer stores while the other multiplies, but for the last tile.
        return waves * max(cycles, (cycles + store) // 2) + store
    return waves * (cycles + store // 2)


def term(
    module: PyObjectPtr, values: Values, count: Py_ssize_t
) abi("C") -> PyObjectPtr:
    """Returns what a cost is multiplied by.

    Args:
        module: The extension.
        values: M, K, N, the device's SMs, the product, and the cost's place.
        count: 6.

    Returns:
        An integer.
    """
    var arguments = Arguments(values)
    var m = arguments.integer()
    var k = arguments.integer()
    var n = arguments.integer()
    var processors = arguments.integer()
    var found = terms(m, k, n, processors, arguments.integer())
    return integer(found[arguments.integer()])
