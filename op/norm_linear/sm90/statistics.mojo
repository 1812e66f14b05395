"""A norm's statistics of each row of x, where no product gathers them: in one read, or together with the sum.
"""

from std.math import ceildiv
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.primitives import warp

from ...call import Call
from ...device import Gpu
from ...norms.norm import Norm, part_rstd
from ...passes.gpu import GpuRunner
from ...passes.normalize import run_normalize
from ...pdl import pdl_attributes, pdl_trigger, pdl_wait

# Warps of one block, and blocks that fit on an SM.
comptime _WARPS = 8
comptime _BLOCKS = 4
comptime _WIDTH = 8
comptime _UNROLL = 4
comptime _Vector = SIMD[DType.float32, _WIDTH]


@always_inline
def _load[
    dtype: DType
](
    row: Pointer[Scalar[dtype], MutAnyOrigin], chunk: Int32, chunks: Int32
) -> SIMD[dtype, _WIDTH]:
    if chunk < chunks:
        return row.unsafe_offset(Int(chunk) * _WIDTH).unsafe_load[
            width=_WIDTH, alignment=16
        ]()
    return SIMD[dtype, _WIDTH](0)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_WARPS * 32)),
    `nvvm.minctasm`=SIMDLength(_BLOCKS),
)
@__name(t"fused_norm_row_statistics_{dtype}")
def row_statistics_kernel[
    dtype: DType, N: Norm
](
    x: Pointer[Scalar[dtype], MutAnyOrigin],
    mean: Pointer[Float32, MutAnyOrigin],
    rstd: Pointer[Float32, MutAnyOrigin],
    m: Int32,
    k: Int32,
    eps: Float32,
):
    """Computes the statistics of rows, one for each warp at a time.

    Grid: rows / _WARPS, but no more than _BLOCKS for each SM. Block: _WARPS warps.

    The pointer to x is mutable because x may still be being written when this
    kernel starts; loads may not bypass the coherent path.

    Parameters:
        dtype: Type of x.
        N: The norm.

    Args:
        x: The rows [m, k]; each starts at a multiple of 16 bytes.
        mean: Receives the means [m], if the norm has them.
        rstd: Receives 1 / sqrt(variance + eps) [m].
        m: Rows.
        k: Elements of a row, a multiple of 8.
        eps: Added to the variance.
    """
    pdl_wait()
    pdl_trigger()
    var index = Int32(block_idx.x) * _WARPS + Int32(thread_idx.x) // 32
    var stride = Int32(grid_dim.x) * _WARPS
    var lane = Int32(thread_idx.x) % 32
    var chunks = k // _WIDTH
    var count = Float32(k)
    if index >= m:
        return

    # One batch of loads is always in flight, across rows too.
    var row = x.unsafe_offset(Int(index) * Int(k))
    var ahead = StaticTuple[SIMD[dtype, _WIDTH], _UNROLL]()
    comptime for i in range(_UNROLL):
        ahead[i] = _load(row, lane + Int32(32 * i), chunks)
    while index < m:
        var shift = Float32(0)
        comptime if N.has_mean:
            shift = N.shift(
                warp.sum(ahead[0].cast[DType.float32]().reduce_add()),
                Float32(min(chunks, 32) * _WIDTH),
            )
        var sum = _Vector(0)
        var squares = _Vector(0)
        var batch = Int32(0)
        var following = index + stride
        while batch < chunks:
            var now = ahead
            var next = batch + 32 * _UNROLL
            var next_row = row
            var start = next
            var limit = chunks
            if next >= chunks:
                next_row = x.unsafe_offset(Int(following) * Int(k))
                start = 0
                limit = chunks if following < m else 0
            comptime for i in range(_UNROLL):
                ahead[i] = _load(next_row, start + lane + Int32(32 * i), limit)
            comptime for i in range(_UNROLL):
                if batch + lane + Int32(32 * i) < chunks:
                    var distance = N.distance[_WIDTH](
                        now[i].cast[DType.float32](), shift
                    )
                    sum += distance
                    squares = distance.fma(distance, squares)
            row = next_row
            batch = next

        var total = warp.sum(sum.reduce_add())
        var total_squares = warp.sum(squares.reduce_add())
        if lane == 0:
            var part = N.part(shift, total, total_squares, count)
            comptime if N.has_mean:
                mean.unsafe_offset(Int(index)).unsafe_store(part[0])
            rstd.unsafe_offset(Int(index)).unsafe_store(
                part_rstd(part, count, eps)
            )
        index = following


def launch_statistics[
    dtype: DType, N: Norm
](gpu: Gpu, mean: Int, rstd: Int, x: Int, m: Int, k: Int, eps: Float32) raises:
    """Queues the row statistics of x.

    Parameters:
        dtype: Type of x.
        N: The norm.

    Args:
        gpu: Where to run.
        mean: Address of the means [M].
        rstd: Address of the reciprocal deviations [M].
        x: Address of x [M, K].
        m: Rows.
        k: Columns, a multiple of 8.
        eps: Added to the variances.

    Raises:
        If the driver refuses.
    """
    var kernel = gpu.context.compile_function[row_statistics_kernel[dtype, N]]()
    gpu.stream.enqueue_function(
        kernel,
        Pointer[Scalar[dtype], MutAnyOrigin](unsafe_from_address=x),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=mean),
        Pointer[Float32, MutAnyOrigin](unsafe_from_address=rstd),
        Int32(m),
        Int32(k),
        eps,
        grid_dim=min(ceildiv(m, _WARPS), _BLOCKS * gpu.processors),
        block_dim=_WARPS * 32,
        attributes=pdl_attributes(),
    )


def launch_rows[
    dtype: DType, N: Norm
](gpu: Gpu, call: Call, mean: Int, rstd: Int) raises -> Int:
    """Queues what is missing of the rows that a folded weight multiplies and of their statistics.

    Parameters:
        dtype: Type of x.
        N: The norm.

    Args:
        gpu: Where to run.
        call: A forward, whose statistics may be given; with a residual its sum is wanted.
        mean: Address of the means [M].
        rstd: Address of the reciprocal deviations [M].

    Returns:
        Address of the rows: x, or the sum.

    Raises:
        If the driver refuses.
    """
    if call.residual != 0:
        var rows = call
        rows.z = 0
        rows.mean = mean
        rows.rstd = rstd
        comptime for is_float32 in [False, True]:
            if (call.norm_is_float32 != 0) == is_float32:
                run_normalize[dtype, DType.float32 if is_float32 else dtype](
                    GpuRunner[DType.float32](gpu), rows
                )
        return call.sum
    if call.has_statistics == 0:
        launch_statistics[dtype, N](
            gpu,
            mean,
            rstd,
            call.x,
            call.M,
            call.K,
            call.eps.cast[DType.float32](),
        )
    return call.x


def waits_for_rows(call: Call) -> Bool:
    """Tells whether the kernel before a product on a folded weight may write its rows, not only their statistics.

    Args:
        call: A forward.

    Returns:
        Whether it may: unless that kernel has computed statistics alone, and waited for the rows.
    """
    return call.residual != 0 or call.has_statistics != 0
