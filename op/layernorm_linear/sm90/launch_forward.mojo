"""The forward: row statistics, and the product that uses them."""

from std.math import ceildiv

from ...device import Gpu
from .arguments import Arguments
from .config import Config
from .epilogue import CORRECTED
from .launch_few_rows import are_few, launch_few_rows
from .launch_matrix import beside_earlier, launch_matrix
from .launch_product import best_config, launch_best_matrix
from .stats import BLOCKS, WARPS, row_statistics_kernel
from .wgmma import K_BLOCK

comptime _GATHERING = Config(
    slices=1,
    columns=256,
    stages=4,
    cluster=2,
    gather=True,
    x_transposed=False,
    w_transposed=False,
    split=False,
    passes=False,
)


def launch_statistics[
    dtype: DType
](gpu: Gpu, mean: Int, rstd: Int, x: Int, m: Int, k: Int, eps: Float32,) raises:
    """Queues the row statistics of x.

    Parameters:
        dtype: Type of x.

    Args:
        gpu: Where to run.
        mean: Address of the means [m].
        rstd: Address of the reciprocal deviations [m].
        x: Address of x [m, k].
        m: Rows.
        k: Columns, a multiple of 8.
        eps: Added to the variances.

    Raises:
        If the driver refuses.
    """
    var kernel = gpu.context.compile_function[row_statistics_kernel[dtype]]()
    gpu.stream.enqueue_function(
        kernel,
        Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=x),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=mean),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=rstd),
        Int32(m),
        Int32(k),
        eps,
        grid_dim=min(ceildiv(m, WARPS), BLOCKS * gpu.processors),
        block_dim=WARPS * 32,
        attributes=beside_earlier(),
    )


def launch_forward[
    dtype: DType
](
    gpu: Gpu,
    y: Int,
    mean: Int,
    rstd: Int,
    x: Int,
    wc: Int,
    s: Int,
    c: Int,
    m: Int,
    n: Int,
    k: Int,
    eps: Float32,
) raises:
    """Queues y = rstd * (x @ wc^T - mean * s) + c, and mean and rstd.

    Parameters:
        dtype: Type of x, wc and y: bfloat16 or float16.

    Args:
        gpu: Where to run.
        y: Address of y [m, n], written.
        mean: Address of the rows' means [m], written.
        rstd: Address of the rows' reciprocal deviations [m], written.
        x: Address of x [m, k].
        wc: Address of the folded weight [n, k].
        s: Address of its row sums [n].
        c: Address of the columns' constants [n].
        m: Rows of x, at least 1.
        n: Rows of wc, a multiple of 8.
        k: Columns of both, a multiple of 8.
        eps: Added to the variances.

    Raises:
        If the driver refuses.
    """
    var arguments = Arguments(m, n, k)
    arguments.eps = eps
    arguments.mean = {unsafe_from_address = mean}
    arguments.rstd = {unsafe_from_address = rstd}
    arguments.s = {unsafe_from_address = s}
    arguments.c = {unsafe_from_address = c}
    var few = are_few(m, k)
    # Few rows and wide tiles gather the statistics on the way.
    if k % K_BLOCK == 0:
        if few:
            launch_few_rows[dtype, False, CORRECTED, gathers=True](
                gpu, y, x, wc, arguments
            )
            return
        if best_config(m, n, gpu.processors) == 0:
            launch_matrix[dtype, _GATHERING, CORRECTED](
                gpu, y, x, wc, arguments
            )
            return
    launch_statistics[dtype](gpu, mean, rstd, x, m, k, eps)
    if few:
        launch_few_rows[dtype, False, CORRECTED](gpu, y, x, wc, arguments)
    else:
        launch_best_matrix[dtype, False, CORRECTED](gpu, y, x, wc, arguments)
