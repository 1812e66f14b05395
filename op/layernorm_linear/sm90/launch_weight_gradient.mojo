"""The gradient of the weight and of the bias: a product that sums over rows.

Its tiles may be few. Then the two blocks of a cluster share the rows that one
tile sums over; and where even those fill less than half of the device, two
grids share them, of which the second starts beside the first and adds what that
one has left in memory.
"""

from std.math import align_up, ceildiv
from std.sys import size_of

from ...device import Gpu
from .arguments import Arguments
from .config import Config
from .epilogue import PLAIN, WIDE
from .launch_matrix import BAND, count_tiles, launch_matrix
from .launch_product import fills
from .wgmma import K_BLOCK


def _config(split: Bool) -> Config:
    return Config(
        slices=1,
        columns=256,
        stages=4,
        cluster=2,
        gather=True,
        x_transposed=True,
        w_transposed=True,
        split=split,
        passes=False,
    )


# Rows that are multiplied while their products are stored.
comptime _SHORT_ROWS = 512
# Rows of a part that outweigh adding it up.
comptime _LONG_ROWS = 2048
# In k blocks: the time between two tiles, and that of each doubling of parts.
comptime _TILE_OVERHEAD = 4
comptime _SPLIT_OVERHEAD = 3


@fieldwise_init
struct _Plan(TrivialRegisterPassable):
    """How the rows are shared."""

    var split: Bool
    """Whether among the blocks of a cluster."""
    var grids: Int
    """Among how many grids."""

    @staticmethod
    def best(m: Int, n: Int, k: Int, processors: Int) -> Self:
        """Finds the plan whose longest-working cluster has the least to do.

        Args:
            m: Rows that are summed over.
            n: Rows of the gradient.
            k: Columns of the gradient.
            processors: Multiprocessors of the device.

        Returns:
            The plan.
        """
        var best = Self(False, 1)
        var blocks = ceildiv(m, K_BLOCK)
        var least = Int.MAX
        comptime for parts in [1, 2, 4]:
            comptime grids = max(parts // 2, 1)
            var tiles = count_tiles(_config(parts > 1), n, k)
            var waves = ceildiv(tiles * grids, processors // 2)
            var cost = (
                waves * (ceildiv(blocks, parts) + _TILE_OVERHEAD)
                + (parts // 2) * _SPLIT_OVERHEAD
            )
            # Two grids have to run together.
            var can = parts <= blocks and (parts < 4 or waves == 1)
            if can and cost < least:
                least = cost
                best = Self(parts > 1, grids)
        return best


def weight_gradient_fills(gpu: Gpu, m: Int, n: Int, k: Int) -> Bool:
    """Tells whether `launch_weight_gradient` keeps the device busy.

    Args:
        gpu: Where to run.
        m: Rows that are summed over.
        n: Rows of the gradient.
        k: Columns of the gradient.

    Returns:
        Whether its tiles do, or the sums are so short that only stores count.
    """
    var plan = _Plan.best(m, n, k, gpu.processors)
    var parts = plan.grids * (2 if plan.split else 1)
    return m <= _SHORT_ROWS or (
        (parts == 1 or m >= parts * _LONG_ROWS)
        and fills(_config(plan.split), n, k, gpu.processors // 2 // plan.grids)
    )


def weight_gradient_workspace(gpu: Gpu, m: Int, n: Int, k: Int) -> Int:
    """Counts the bytes that `launch_weight_gradient` needs.

    Args:
        gpu: Where to run.
        m: Rows that are summed over.
        n: Rows of the gradient.
        k: Columns of the gradient.

    Returns:
        The bytes.
    """
    var plan = _Plan.best(m, n, k, gpu.processors)
    return n * (k + 1) * 4 if plan.grids > 1 else 0


def launch_weight_gradient[
    dtype: DType, out_dtype: DType
](
    gpu: Gpu,
    dw: Int,
    db: Int,
    dy: Int,
    z: Int,
    workspace: Int,
    m: Int,
    n: Int,
    k: Int,
    accumulate: Bool,
) raises:
    """Queues dw = dy^T @ z and db = the column sums of dy.

    Parameters:
        dtype: Type of dy and z: bfloat16 or float16.
        out_dtype: Type of dw and db: `dtype` or float32.

    Args:
        gpu: Where to run.
        dw: Address of dw [n, k].
        db: Address of db [n], or 0 if it is not wanted.
        dy: Address of dy [m, n].
        z: Address of z [m, k].
        workspace: Address of `weight_gradient_workspace` bytes, a multiple of
            16.
        m: Rows, at least 1.
        n: Columns of dy, a multiple of 8.
        k: Columns of z, a multiple of 8.
        accumulate: Whether to add to what is there; in float32 only.

    Raises:
        If the driver refuses.
    """
    comptime mode = WIDE if out_dtype == DType.float32 else PLAIN
    comptime whole = _config(False)
    comptime split = _config(True)
    var plan = _Plan.best(m, n, k, gpu.processors)
    var arguments = Arguments(n, k, m)
    arguments.band = BAND
    arguments.row_sums = Int64(db)
    arguments.wide = {unsafe_from_address = dw}
    arguments.accumulate = Int32(accumulate)
    if not plan.split:
        launch_matrix[dtype, whole, mode](gpu, dw, dy, z, arguments)
        return
    if plan.grids == 1:
        launch_matrix[dtype, split, mode](gpu, dw, dy, z, arguments)
        return

    var first_rows = align_up(ceildiv(m, 2), K_BLOCK)
    var first = arguments
    first.k = Int32(first_rows)
    arguments.k = Int32(m - first_rows)
    arguments.follows = 1
    arguments.accumulate = 1
    comptime if mode != WIDE:
        var row_sums = workspace + n * k * 4
        first.accumulate = 0
        first.wide = {unsafe_from_address = workspace}
        first.row_sums = Int64(row_sums if db != 0 else 0)
        arguments.wide = first.wide
        arguments.wide_row_sums = {unsafe_from_address = row_sums}
    launch_matrix[dtype, split, WIDE](gpu, 0, dy, z, first)
    launch_matrix[dtype, split, mode](
        gpu,
        dw,
        dy + first_rows * n * size_of[dtype](),
        z + first_rows * k * size_of[dtype](),
        arguments,
    )
