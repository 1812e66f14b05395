"""Mean and reciprocal standard deviation of each row of x, in one read.

Sums are taken of the distances to a shift near the row's mean, the average of
its first elements, so that nothing cancels when the mean is large against the
deviation.
"""

from std.math import sqrt
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.primitives import warp

from .ptx import let_later_grids_start, wait_on_earlier_grids

comptime WARPS = 8
"""Warps of one block."""
comptime BLOCKS = 4
"""Blocks that fit a multiprocessor."""
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
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPS * 32)),
    `nvvm.minctasm`=SIMDLength(BLOCKS),
)
@__name(t"fused_norm_row_statistics_{dtype}")
def row_statistics_kernel[
    dtype: DType
](
    x: Pointer[Scalar[dtype], MutAnyOrigin],
    mean: Pointer[Float32, MutAnyOrigin],
    rstd: Pointer[Float32, MutAnyOrigin],
    m: Int32,
    k: Int32,
    eps: Float32,
):
    """Computes the statistics of rows, one per warp at a time.

    The pointer to x is mutable because x may still be being written when this
    kernel starts; loads may not bypass the coherent path.

    Parameters:
        dtype: Type of x.

    Args:
        x: The rows [m, k]; each starts at a multiple of 16 bytes.
        mean: Receives the means [m].
        rstd: Receives 1 / sqrt(variance + eps) [m].
        m: Rows.
        k: Elements of a row, a multiple of 8.
        eps: Added to the variance.
    """
    wait_on_earlier_grids()
    let_later_grids_start()
    var index = Int32(block_idx.x) * WARPS + Int32(thread_idx.x) // 32
    var stride = Int32(grid_dim.x) * WARPS
    var lane = Int32(thread_idx.x) % 32
    var chunks = k // _WIDTH
    var count = Float32(k)
    if index >= m:
        return

    # One batch of loads is always under way, across rows too.
    var row = x.unsafe_offset(Int(index) * Int(k))
    var ahead = StaticTuple[SIMD[dtype, _WIDTH], _UNROLL]()
    comptime for i in range(_UNROLL):
        ahead[i] = _load(row, lane + Int32(32 * i), chunks)
    while index < m:
        var shift = warp.sum(
            ahead[0].cast[DType.float32]().reduce_add()
        ) / Float32(min(chunks, 32) * _WIDTH)
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
                    var distance = now[i].cast[DType.float32]() - shift
                    sum += distance
                    squares = distance.fma(distance, squares)
            row = next_row
            batch = next

        var total = warp.sum(sum.reduce_add())
        var total_squares = warp.sum(squares.reduce_add())
        if lane == 0:
            var offset = total / count
            var variance = max(total_squares - total * offset, 0) / count
            mean.unsafe_offset(Int(index)).unsafe_store(shift + offset)
            rstd.unsafe_offset(Int(index)).unsafe_store(
                1 / sqrt(variance + eps)
            )
        index = following
