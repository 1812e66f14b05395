"""Launch of dz = dy W and the pass over its rows as one kernel.

Its warps wait for rows that other blocks make. So all blocks have to run at one
time, which the launch asks for: two such grids on two streams could otherwise
each keep the other's blocks from starting.
"""

from std.math import align_up, ceildiv

from ...rows.columns import Total, Totals
from ...device import Gpu
from ...rows.launch import is_wide
from ...rows.launch_columns import launch_totals
from ...rows.operands import accumulator
from ..between_products import BetweenProducts
from .arguments import Arguments
from .epilogue import PLAIN
from .launch_matrix import beside_earlier, launch_matrix
from .launch_product import best_config, matrix_config
from .prepare import PREPARE_THREADS, prepare_kernel
from .progress import SLICE_ROWS

comptime _CONFIG = matrix_config[0, True, passes=True]()
# Cluster tiles in a band of the walk: rows wait for those of the same band.
comptime _BAND = 4
# A product that takes as long as the pass over its rows.
comptime _FEWEST_OUTPUTS = 2048
# Halves of as many rows as are made at one time: the pass over the last ones is
# not hidden.
comptime _FEWEST_HALVES = 9


@fieldwise_init
struct _Workspace(TrivialRegisterPassable):
    """What the kernel needs beside its tensors, in bytes from its start, where
    the counters are."""

    var slices: Int
    """Slices of tiles, which reach beyond the last row."""
    var counters: Int
    """Two for each slice, and the ticket."""
    var affine: Int
    """Gamma and beta in float32."""
    var factors: Int
    """Factors of rows."""
    var sums: Int
    """Sums over the rows of each slice."""
    var end: Int
    """Its size."""

    def __init__(out self, m: Int, k: Int):
        """Lays out the workspace.

        Args:
            m: Rows.
            k: Features.
        """
        self.slices = align_up(m, _CONFIG.cluster_rows()) // SLICE_ROWS
        self.counters = 2 * self.slices + 1
        self.affine = align_up(4 * self.counters, 256)
        self.factors = self.affine + align_up(8 * k, 256)
        self.sums = self.factors + align_up(16 * m, 256)
        self.end = self.sums + 8 * self.slices * k


def passes_rows(gpu: Gpu, m: Int, n: Int, k: Int) -> Bool:
    """Tells whether one kernel is faster than a product and a pass.

    Args:
        gpu: Where to run.
        m: Rows.
        n: Outputs.
        k: Features.

    Returns:
        Whether most of the pass hides behind the product, and its tiles are
        those that are fastest.
    """
    return n >= _FEWEST_OUTPUTS and 2 * m >= _FEWEST_HALVES * _rows_of_wave(
        gpu, k
    )


def row_pass_bytes(gpu: Gpu, m: Int, n: Int, k: Int) -> Int:
    """Counts the bytes of the workspace of `launch_row_pass`.

    Args:
        gpu: Where to run.
        m: Rows.
        n: Outputs.
        k: Features.

    Returns:
        The bytes; 0 where it does not pay.
    """
    return _Workspace(m, k).end if passes_rows(gpu, m, n, k) else 0


def can_pass_rows[dtype: DType](rows: BetweenProducts) -> Bool:
    """Tells whether the kernel can do what is wanted.

    Parameters:
        dtype: Type of the matrices.

    Args:
        rows: The tensors.

    Returns:
        Whether z and dx are wanted, and loads and stores may be of 16 bytes.
    """
    return (
        rows.dx != 0
        and rows.z == rows.dz
        and is_wide[dtype](rows.rows[accumulator[dtype]()]())
    )


def launch_row_pass[
    dtype: DType, ln_dtype: DType
](gpu: Gpu, rows: BetweenProducts, w: Int) raises:
    """Queues dz = dy W, then dx, z, dgamma and dbeta from its rows.

    Parameters:
        dtype: Type of the matrices: bfloat16 or float16.
        ln_dtype: Type of gamma, beta and their gradients.

    Args:
        gpu: Where to run.
        rows: The tensors, of which it `can_pass_rows`; with `row_pass_bytes`
            of workspace.
        w: Address of the weight [N, K].

    Raises:
        If the driver refuses.
    """
    var m = rows.M
    var k = rows.K
    var own = _Workspace(m, k)
    var start = Int(rows.workspace)
    var arguments = Arguments(m, k, rows.N)
    arguments.band = _BAND
    ref its = arguments.rows
    its.rows = Int32(m)
    its.length = Int32(k)
    its.early = Int32(max(m - _rows_of_wave(gpu, k), 0) // SLICE_ROWS)
    its.early *= SLICE_ROWS
    its.tile_columns = Int32(ceildiv(k, _CONFIG.columns))
    its.z = rows.z
    its.x = rows.x
    its.affine = Int64(start + own.affine)
    its.mean = rows.mean
    its.rstd = rows.rstd
    its.dx = rows.dx
    its.stored = {unsafe_from_address = start}
    its.summed = its.stored.unsafe_offset(own.slices)
    its.ticket = its.summed.unsafe_offset(own.slices)
    its.factors = Int64(start + own.factors)
    its.sums = Int64(start + own.sums)
    var prepare = gpu.context.compile_function[prepare_kernel[ln_dtype]]()
    gpu.stream.enqueue_function(
        prepare,
        its.stored,
        Int32(own.counters),
        its.affine,
        rows.gamma,
        rows.beta,
        its.length,
        grid_dim=ceildiv(max(own.counters, k), PREPARE_THREADS),
        block_dim=PREPARE_THREADS,
        attributes=beside_earlier(),
    )
    launch_matrix[dtype, _CONFIG, PLAIN](
        gpu, Int(rows.z), Int(rows.dy), w, arguments
    )
    var totals = Totals()
    var parts = ceildiv(m, SLICE_ROWS)
    var partial = its.sums
    for sum in [rows.dgamma, rows.dbeta]:
        totals.add(
            Total(
                sum,
                partial,
                Int32(parts),
                Int32(k),
                ln_dtype == DType.float32,
            )
        )
        partial += Int64(4 * parts * k)
    launch_totals[dtype](gpu, totals)


def _rows_of_wave(gpu: Gpu, k: Int) -> Int:
    """Counts the rows of the tiles that are computed at one time."""
    var together = ceildiv(
        gpu.processors // _CONFIG.cluster, ceildiv(k, _CONFIG.columns)
    )
    return max(together, _BAND) * _CONFIG.cluster_rows()
