"""Launch of the matrix kernel."""

from max.gpu.host import FuncAttribute
from max.gpu.host.launch_attribute import (
    LaunchAttribute,
    LaunchAttributeID,
    LaunchAttributeValue,
)
from std.math import ceildiv

from ...device import Gpu
from .arguments import Arguments
from .config import THREADS, Config
from .epilogue import WIDE
from .kernel import matrix_kernel
from .tensor_map import operand_map, tensor_map

comptime BAND = 8
"""Cluster tiles in a band of the walk: 2048 rows of x, about as much as the
columns of the weight that the other clusters of a wave then need."""


def beside_earlier() -> List[LaunchAttribute]:
    """Lets a grid start while the one before it ends; it has to wait by itself.

    Returns:
        The attributes of the launch.
    """
    return [
        LaunchAttribute(
            LaunchAttributeID.PROGRAMMATIC_STREAM_SERIALIZATION,
            LaunchAttributeValue(True),
        )
    ]


def _all_at_one_time() -> List[LaunchAttribute]:
    """Starts a grid only when all of its blocks can run."""
    return [
        LaunchAttribute(
            LaunchAttributeID.COOPERATIVE, LaunchAttributeValue(True)
        )
    ]


def count_tiles(config: Config, m: Int, n: Int) -> Int:
    """Counts the tiles of a product.

    Args:
        config: Compile-time choices.
        m: Rows of the product.
        n: Columns of the product.

    Returns:
        How many tiles clusters compute.
    """
    return ceildiv(m, config.cluster_rows()) * ceildiv(n, config.columns)


def launch_matrix[
    dtype: DType, config: Config, mode: Int
](gpu: Gpu, y: Int, x: Int, w: Int, arguments: Arguments) raises:
    """Queues y = epilogue(x @ w^T).

    Parameters:
        dtype: Type of x and w, bfloat16, float16 or float32 as tf32; and of y,
            unless in mode `WIDE`.
        config: Compile-time choices; they say which operands are transposed.
        mode: Epilogue.

    Args:
        gpu: Where to run.
        y: Address of y [m, n]; in mode `WIDE` not used.
        x: Address of x [m, k] or [k, m].
        w: Address of w [n, k] or [k, n].
        arguments: Sizes, and what goes with the matrices.

    Raises:
        If the driver refuses.
    """
    var m = Int(arguments.m)
    var n = Int(arguments.n)
    var k = Int(arguments.k)
    ref ctx = gpu.context
    var x_map = operand_map[dtype, config.x_transposed](
        ctx, x, m, k, config.rows()
    )
    var w_map = operand_map[dtype, config.w_transposed](
        ctx, w, n, k, config.columns // config.sharers()
    )
    var y_map = x_map
    comptime if mode != WIDE:
        y_map = tensor_map[dtype](ctx, y, m, n, 16)
    var clusters = count_tiles(config, m, n)
    comptime if not config.split:
        clusters = min(clusters, gpu.processors // config.cluster)
    var kernel = ctx.compile_function[matrix_kernel[dtype, config, mode]](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(config.shared_bytes())
        )
    )
    gpu.stream.enqueue_function(
        kernel,
        x_map,
        w_map,
        y_map,
        arguments,
        grid_dim=clusters * config.cluster,
        block_dim=THREADS,
        shared_mem_bytes=config.shared_bytes(),
        attributes=_all_at_one_time() if config.passes else beside_earlier(),
    )
