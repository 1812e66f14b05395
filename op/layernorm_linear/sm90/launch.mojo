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

from max.gpu.host.launch_attribute import (
    LaunchAttribute,
    LaunchAttributeID,
    LaunchAttributeValue,
)

from .config import THREADS, Config
from .epilogue import CORRECTED, PLAIN
from .few_rows import (
    FEW_CLUSTER,
    FEW_OUTPUTS,
    FEW_THREADS,
    few_rows_kernel,
    few_rows_shared_bytes,
)
from .fold import WARPS as FOLD_WARPS
from .fold import fold_kernel
from .kernel import matrix_kernel
from .stats import BLOCKS as STATS_BLOCKS
from .stats import WARPS as STATS_WARPS
from .stats import row_statistics_kernel
from .wgmma import K_BLOCK


def _beside_earlier() -> List[LaunchAttribute]:
    # Lets the grid start while the one before it ends; it waits by itself.
    return [
        LaunchAttribute(
            LaunchAttributeID.PROGRAMMATIC_STREAM_SERIALIZATION,
            LaunchAttributeValue(True),
        )
    ]


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

    Raises:
        If the driver refuses.
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
    eps: Float32,
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
        eps: Added to gathered variances.
        s: Address of the row sums of w, or 0.
        c: Address of the columns' constants, or 0.
        m: Rows of x.
        n: Rows of w.
        k: Columns of both.
        band: Rows of cluster tiles in a band of the walk; 0 to walk in runs.
        multiprocessors: Of the device.

    Raises:
        If the driver refuses.
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
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=mean),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=rstd),
        eps,
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=s),
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=c),
        Int32(m),
        Int32(n),
        Int32(k),
        Int32(band),
        grid_dim=clusters * config.cluster,
        block_dim=THREADS,
        shared_mem_bytes=config.shared_bytes(),
        attributes=_beside_earlier(),
    )


def launch_statistics[
    dtype: DType
](
    ctx: DeviceContext,
    stream: DeviceStream,
    mean: Int,
    rstd: Int,
    x: Int,
    m: Int,
    k: Int,
    eps: Float32,
    multiprocessors: Int,
) raises:
    """Queues the row statistics of x.

    Parameters:
        dtype: Type of x.

    Args:
        ctx: The device.
        stream: The stream to queue on.
        mean: Address of the means [m].
        rstd: Address of the reciprocal deviations [m].
        x: Address of x [m, k].
        m: Rows.
        k: Columns, a multiple of 8.
        eps: Added to the variances.
        multiprocessors: Of the device.

    Raises:
        If the driver refuses.
    """
    var kernel = ctx.compile_function[row_statistics_kernel[dtype]]()
    stream.enqueue_function(
        kernel,
        Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=x),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=mean),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=rstd),
        Int32(m),
        Int32(k),
        eps,
        grid_dim=min(
            (m + STATS_WARPS - 1) // STATS_WARPS,
            STATS_BLOCKS * multiprocessors,
        ),
        block_dim=STATS_WARPS * 32,
        attributes=_beside_earlier(),
    )


# Rows that the kernels for few rows are made for.
comptime _FEW_ROWS = [16, 64]
# Widest first. A narrower tile reads more for each product, but fills the
# device where there are few tiles; the narrowest serves few rows, where the
# weight is streamed once and no block shares it.
comptime _CONFIGS = [
    Config(slices=1, columns=256, stages=4, cluster=2, gather=False),
    Config(slices=1, columns=128, stages=6, cluster=2, gather=False),
    Config(slices=1, columns=64, stages=8, cluster=1, gather=False),
]
comptime _GATHERING = Config(
    slices=1, columns=256, stages=4, cluster=2, gather=True
)
# Eight cluster tiles are 2048 rows of x, about as much as the columns of the
# weight that the other clusters of a wave then need.
comptime _BAND = 8
# Columns that the time between two tiles is worth.
comptime _TILE_OVERHEAD = 16


def _ceildiv(a: Int, b: Int) -> Int:
    return (a + b - 1) // b


def _best_config(m: Int, n: Int, multiprocessors: Int) -> Int:
    # The one whose longest-working cluster has the least to do.
    var best = 0
    var least = Int.MAX
    comptime for i in range(len(_CONFIGS)):
        comptime config = _CONFIGS[i]
        var tiles = _ceildiv(m, config.cluster * config.rows()) * _ceildiv(
            n, config.columns
        )
        var waves = _ceildiv(tiles, multiprocessors // config.cluster)
        var cost = waves * (config.columns + _TILE_OVERHEAD)
        if cost < least:
            least = cost
            best = i
    return best


def launch_few_rows[
    dtype: DType, rows: Int, mode: Int
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
) raises:
    """Queues y = epilogue(x @ w^T) for few rows of x.

    Parameters:
        dtype: Type of x, w and y: bfloat16 or float16.
        rows: Most rows of x.
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
        m: Rows of x, at most `rows`.
        n: Rows of w.
        k: Columns of both, more than 64.

    Raises:
        If the driver refuses.
    """
    var kernel = ctx.compile_function[few_rows_kernel[dtype, rows, mode]](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(few_rows_shared_bytes(rows))
        )
    )
    stream.enqueue_function(
        kernel,
        tensor_map[dtype](ctx, w, n, k, FEW_OUTPUTS),
        tensor_map[dtype](ctx, x, m, k, rows),
        Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=y),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=mean),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=rstd),
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=s),
        Pointer[Float32, ImmutAnyOrigin](unsafe_from_address=c),
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=_ceildiv(n, FEW_OUTPUTS) * FEW_CLUSTER,
        block_dim=FEW_THREADS,
        shared_mem_bytes=few_rows_shared_bytes(rows),
        attributes=_beside_earlier(),
    )


def launch_product[
    dtype: DType
](
    ctx: DeviceContext,
    stream: DeviceStream,
    y: Int,
    x: Int,
    w: Int,
    m: Int,
    n: Int,
    k: Int,
    multiprocessors: Int,
) raises:
    """Queues y = x @ w^T.

    Parameters:
        dtype: Type of x, w and y: bfloat16 or float16.

    Args:
        ctx: The device.
        stream: The stream to queue on.
        y: Address of y [m, n].
        x: Address of x [m, k].
        w: Address of w [n, k].
        m: Rows of x, at least 1.
        n: Rows of w, a multiple of 8.
        k: Columns of both, a multiple of 8.
        multiprocessors: Of the device.

    Raises:
        If the driver refuses.
    """
    comptime for i in range(len(_FEW_ROWS)):
        comptime most = _FEW_ROWS[i]
        if m <= most and k > K_BLOCK:
            launch_few_rows[dtype, most, PLAIN](
                ctx, stream, y, x, w, 0, 0, 0, 0, m, n, k
            )
            return
    var best = _best_config(m, n, multiprocessors)
    comptime for i in range(len(_CONFIGS)):
        if best == i:
            launch_matrix[dtype, _CONFIGS[i], PLAIN](
                ctx,
                stream,
                y,
                x,
                w,
                0,
                0,
                0,
                0,
                0,
                m,
                n,
                k,
                _BAND,
                multiprocessors,
            )


def launch_forward[
    dtype: DType
](
    ctx: DeviceContext,
    stream: DeviceStream,
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
    multiprocessors: Int,
) raises:
    """Queues y = rstd * (x @ wc^T - mean * s) + c, and mean and rstd.

    Parameters:
        dtype: Type of x, wc and y: bfloat16 or float16.

    Args:
        ctx: The device.
        stream: The stream to queue on.
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
        multiprocessors: Of the device.

    Raises:
        If the driver refuses.
    """
    var best = _best_config(m, n, multiprocessors)
    # Wide tiles gather the statistics on the way. The copy engine pads the
    # last k block with zeros, which sums may ignore but a variance may not.
    comptime few = _FEW_ROWS[1]
    if best == 0 and k % K_BLOCK == 0 and m > few:
        launch_matrix[dtype, _GATHERING, CORRECTED](
            ctx,
            stream,
            y,
            x,
            wc,
            mean,
            rstd,
            eps,
            s,
            c,
            m,
            n,
            k,
            0,
            multiprocessors,
        )
        return
    launch_statistics[dtype](
        ctx, stream, mean, rstd, x, m, k, eps, multiprocessors
    )
    comptime for i in range(len(_FEW_ROWS)):
        comptime most = _FEW_ROWS[i]
        if m <= most and k > K_BLOCK:
            launch_few_rows[dtype, most, CORRECTED](
                ctx, stream, y, x, wc, mean, rstd, s, c, m, n, k
            )
            return
    comptime for i in range(len(_CONFIGS)):
        if best == i:
            launch_matrix[dtype, _CONFIGS[i], CORRECTED](
                ctx,
                stream,
                y,
                x,
                wc,
                mean,
                rstd,
                eps,
                s,
                c,
                m,
                n,
                k,
                _BAND,
                multiprocessors,
            )


def launch_fold[
    dtype: DType, affine_dtype: DType
](
    ctx: DeviceContext,
    stream: DeviceStream,
    wc: Int,
    s: Int,
    c: Int,
    w: Int,
    gamma: Int,
    beta: Int,
    bias: Int,
    n: Int,
    k: Int,
    centred: Bool,
) raises:
    """Queues the fold of a weight.

    Parameters:
        dtype: Type of the weight and the bias.
        affine_dtype: Type of gamma and beta.

    Args:
        ctx: The device.
        stream: The stream to queue on.
        wc: Address of the folded weight [n, k].
        s: Address of its row sums [n].
        c: Address of the columns' constants [n].
        w: Address of the weight [n, k].
        gamma: Address of gamma [k], or 0 for ones.
        beta: Address of beta [k], or 0 for zeros.
        bias: Address of the bias [n], or 0 for zeros.
        n: Rows of the weight.
        k: Columns of the weight, a multiple of 8.
        centred: Whether the rows' means are taken out.

    Raises:
        If the driver refuses.
    """
    comptime Affine = Pointer[Scalar[affine_dtype], ImmutAnyOrigin]
    var kernel = ctx.compile_function[fold_kernel[dtype, affine_dtype]]()
    stream.enqueue_function(
        kernel,
        Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=wc),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=s),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=c),
        Pointer[Scalar[dtype], ImmutAnyOrigin](unsafe_from_address=w),
        Affine(unsafe_from_address=gamma),
        Affine(unsafe_from_address=beta),
        Pointer[Scalar[dtype], ImmutAnyOrigin](unsafe_from_address=bias),
        Int32(n),
        Int32(k),
        Int32(gamma != 0),
        Int32(beta != 0),
        Int32(bias != 0),
        Int32(centred),
        grid_dim=(n + FOLD_WARPS - 1) // FOLD_WARPS,
        block_dim=FOLD_WARPS * 32,
    )
