"""The gradient of the weight and of the bias: a product that sums over rows."""

from std.math import ceildiv

from ...rowwise.launch import Gpu
from .arguments import Arguments
from .config import Config
from .epilogue import PLAIN, WIDE
from .launch_matrix import BAND, count_tiles, launch_matrix
from .wgmma import K_BLOCK


def _config(parts: Int) -> Config:
    # Where there are few tiles for the multiprocessors, the blocks of a cluster
    # share the rows that one tile sums over.
    return Config(
        slices=1,
        columns=256,
        stages=4,
        cluster=max(parts, 2),
        gather=True,
        x_transposed=True,
        w_transposed=True,
        split=parts > 1,
    )


# In k blocks: the time between two tiles, and that of the sum over a cluster.
comptime _TILE_OVERHEAD = 4
comptime _SUM_OVERHEAD = 3


def _best_parts(m: Int, n: Int, k: Int, processors: Int) -> Int:
    """Chooses into how many parts the rows are split."""
    var blocks = ceildiv(m, K_BLOCK)
    var best = 1
    var least = Int.MAX
    comptime for parts in [1, 2, 4]:
        comptime config = _config(parts)
        # Some multiprocessors have no three neighbours.
        var clusters = processors // config.cluster - config.cluster // 4
        var waves = ceildiv(count_tiles(config, n, k), clusters)
        var cost = waves * (ceildiv(blocks, parts) + _TILE_OVERHEAD)
        comptime if parts > 1:
            cost += _SUM_OVERHEAD
        if cost < least and parts <= blocks:
            least = cost
            best = parts
    return best


def launch_weight_gradient[
    dtype: DType, out_dtype: DType
](
    gpu: Gpu,
    dw: Int,
    db: Int,
    dy: Int,
    z: Int,
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
        m: Rows, at least 1.
        n: Columns of dy, a multiple of 8.
        k: Columns of z, a multiple of 8.
        accumulate: Whether to add to what is there; in float32 only.

    Raises:
        If the driver refuses.
    """
    var arguments = Arguments(n, k, m)
    arguments.band = BAND
    arguments.row_sums = Int64(db)
    arguments.wide = {unsafe_from_address = dw}
    arguments.accumulate = Int32(accumulate)
    comptime mode = WIDE if out_dtype == DType.float32 else PLAIN
    var best = _best_parts(m, n, k, gpu.processors)
    comptime for parts in [1, 2, 4]:
        if best == parts:
            launch_matrix[dtype, _config(parts), mode](
                gpu, dw, dy, z, arguments
            )
