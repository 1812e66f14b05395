"""Products of a matrix and a weight, in the kernel that suits their sizes."""

from std.math import ceildiv

from ...device import Gpu
from .arguments import Arguments
from .config import Config
from .epilogue import PLAIN
from .launch_few_rows import are_few, launch_few_rows
from .launch_matrix import BAND, count_tiles, launch_matrix


def matrix_config[i: Int, w_transposed: Bool, passes: Bool = False]() -> Config:
    """Returns a shape of the matrix kernel.

    Widest first. A narrower tile reads more for each product, but fills the
    device where there are few tiles; the narrowest serves few rows, where the
    weight is streamed once and no block shares it.

    Parameters:
        i: Which one.
        w_transposed: Whether w is stored as [k, n].
        passes: Whether the rows of the product go through the backward of
            LayerNorm.

    Returns:
        The compile-time choices.
    """
    comptime columns = 256 if i == 0 else 128 if i == 1 else 64
    comptime stages = 4 if i == 0 else 6 if i == 1 else 8
    return Config(
        slices=1,
        columns=columns,
        stages=stages,
        cluster=2 if columns > 64 else 1,
        gather=False,
        x_transposed=False,
        w_transposed=w_transposed,
        split=False,
        passes=passes,
    )


comptime _CONFIGS = 3
# Columns that the time between two tiles is worth.
comptime _TILE_OVERHEAD = 16


# Of the multiprocessors' time, what a product has to use to be worth launching.
comptime _FULL_PERCENT = 80


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


def product_fills(gpu: Gpu, m: Int, n: Int, k: Int) -> Bool:
    """Tells whether `launch_product` keeps the device busy.

    Args:
        gpu: Where to run.
        m: Rows of the product.
        n: Columns of the product.
        k: Length of the sums.

    Returns:
        Whether its tiles do, or the rows are few.
    """
    if are_few(m, k):
        return True
    var best = best_config(m, n, gpu.processors)
    comptime for i in range(_CONFIGS):
        comptime config = matrix_config[i, True]()
        if best == i:
            return fills(config, m, n, gpu.processors // config.cluster)
    return False


def best_config(m: Int, n: Int, processors: Int) -> Int:
    """Chooses the shape whose longest-working cluster has the least to do.

    Args:
        m: Rows of the product.
        n: Columns of the product.
        processors: Multiprocessors of the device.

    Returns:
        Which one.
    """
    var best = 0
    var least = Int.MAX
    comptime for i in range(_CONFIGS):
        comptime config = matrix_config[i, False]()
        var waves = ceildiv(
            count_tiles(config, m, n), processors // config.cluster
        )
        var cost = waves * (config.columns + _TILE_OVERHEAD)
        if cost < least:
            least = cost
            best = i
    return best


def launch_best_matrix[
    dtype: DType, w_transposed: Bool, mode: Int
](gpu: Gpu, y: Int, x: Int, w: Int, arguments: Arguments) raises:
    """Queues y = epilogue(x @ w^T) in the best shape of the matrix kernel.

    Parameters:
        dtype: Type of x, w and y: bfloat16, float16, or float32 as tf32.
        w_transposed: Whether w is stored as [k, n].
        mode: Epilogue, `PLAIN`, `CORRECTED` or `BIASED`.

    Args:
        gpu: Where to run.
        y: Address of y [m, n].
        x: Address of x [m, k].
        w: Address of w [n, k] or [k, n].
        arguments: Sizes, and what goes with the matrices.

    Raises:
        If the driver refuses.
    """
    var banded = arguments
    banded.band = BAND
    var best = best_config(Int(arguments.m), Int(arguments.n), gpu.processors)
    comptime for i in range(_CONFIGS):
        if best == i:
            launch_matrix[dtype, matrix_config[i, w_transposed](), mode](
                gpu, y, x, w, banded
            )


def launch_product[
    dtype: DType, w_transposed: Bool, mode: Int = PLAIN
](
    gpu: Gpu,
    y: Int,
    x: Int,
    w: Int,
    m: Int,
    n: Int,
    k: Int,
    bias: Int = 0,
) raises:
    """Queues y = x @ w^T + bias.

    Parameters:
        dtype: Type of x, w and y: bfloat16, float16, or float32 as tf32.
        w_transposed: Whether w is stored as [k, n].
        mode: `BIASED`, or `PLAIN` for no bias.

    Args:
        gpu: Where to run.
        y: Address of y [m, n].
        x: Address of x [m, k].
        w: Address of w [n, k] or [k, n].
        m: Rows of x, at least 1.
        n: Columns of y, a multiple of 16 bytes.
        k: Length of the sums, a multiple of 16 bytes.
        bias: Address of the bias [n], a multiple of 16.

    Raises:
        If the driver refuses.
    """
    var arguments = Arguments(m, n, k)
    arguments.bias = Int64(bias)
    if are_few(m, k):
        launch_few_rows[dtype, w_transposed, mode](gpu, y, x, w, arguments)
    else:
        launch_best_matrix[dtype, w_transposed, mode](gpu, y, x, w, arguments)
