"""Host side of the matrix kernel: tensor maps, grid, launch."""

from std.utils import IndexList
from max.gpu.host import DeviceBuffer, DeviceContext, DeviceStream
from max.gpu.host import FuncAttribute
from max.gpu.host.nvidia.tma import (
    TMADescriptor,
    TensorMapL2Promotion,
    TensorMapSwizzle,
    create_tma_descriptor,
)

from .config import THREADS, Config
from .kernel import matrix_kernel
from .wgmma import K_BLOCK


def tensor_map[
    dtype: DType
](
    ctx: DeviceContext,
    address: Int,
    rows: Int,
    columns: Int,
    box_rows: Int,
) raises -> TMADescriptor:
    """Describes a row-major matrix to the copy engine, in boxes of 64 columns.

    Parameters:
        dtype: Type of the elements.

    Args:
        ctx: The device.
        address: Global address of the matrix, a multiple of 16.
        rows: Its rows.
        columns: Its columns, a multiple of 8.
        box_rows: Rows of one box.

    Returns:
        The tensor map.
    """
    return create_tma_descriptor[
        dtype,
        2,
        TensorMapSwizzle.SWIZZLE_128B,
        TensorMapL2Promotion.L2_256B,
    ](
        DeviceBuffer[dtype](
            ctx,
            Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=address),
            1,
            owning=False,
        ),
        IndexList[2](rows, columns),
        IndexList[2](columns, 1),
        IndexList[2](box_rows, K_BLOCK),
    )


def launch_matrix[
    dtype: DType, config: Config, mode: Int
](
    ctx: DeviceContext,
    stream: DeviceStream,
    y: Int,
    x: Int,
    w: Int,
    mean: Int,
    rstd: Int,
    s: Int,
    c: Int,
    m: Int,
    n: Int,
    k: Int,
    band: Int,
    multiprocessors: Int,
) raises:
    """Queues y = epilogue(x @ w^T).

    Parameters:
        dtype: Type of x, w and y: bfloat16 or float16.
        config: Compile-time choices.
        mode: Epilogue.

    Args:
        ctx: The device.
        stream: The stream to queue on.
        y: Address of y [m, n].
        x: Address of x [m, k].
        w: Address of w [n, k].
        mean: Address of the rows' means, or 0.
        rstd: Address of the rows' reciprocal deviations, or 0.
        s: Address of the row sums of w, or 0.
        c: Address of the columns' constants, or 0.
        m: Rows of x.
        n: Rows of w.
        k: Columns of both.
        band: Rows of cluster tiles in a band of the walk.
        multiprocessors: Of the device.
    """
    var x_map = tensor_map[dtype](ctx, x, m, k, config.rows())
    var w_map = tensor_map[dtype](
        ctx, w, n, k, config.columns // config.cluster
    )
    var y_map = tensor_map[dtype](ctx, y, m, n, 16)
    var cluster_rows = config.cluster * config.rows()
    var tiles = ((m + cluster_rows - 1) // cluster_rows) * (
        (n + config.columns - 1) // config.columns
    )
    var clusters = min(multiprocessors // config.cluster, tiles)
    var kernel = ctx.compile_function[matrix_kernel[dtype, config, mode]](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(config.shared_bytes())
        )
    )
    stream.enqueue_function(
        kernel,
        x_map,
        w_map,
        y_map,
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=mean),
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=rstd),
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=s),
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=c),
        Int32(m),
        Int32(n),
        Int32(k),
        Int32(band),
        grid_dim=clusters * config.cluster,
        block_dim=THREADS,
        shared_mem_bytes=config.shared_bytes(),
    )
