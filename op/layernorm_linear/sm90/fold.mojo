"""The weight with gamma in it and its rows centred, and what goes with it.

For y = LayerNorm(x) W^T + b: Wc = round(W * gamma - its row's mean),
s = row sums of Wc as rounded, c = b + W beta. Then
y = rstd * (x Wc^T - mean * s) + c.
"""

from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.primitives import warp

comptime WARPS = 8
"""Warps, and so rows, of one block."""
comptime _WIDTH = 8
# Loads under way at once; the second pass finds the row in the L2 cache, which
# costs less than the registers that would hold it.
comptime _UNROLL = 4
comptime _Vector = SIMD[DType.float32, _WIDTH]


@always_inline
def _load[
    dtype: DType
](row: Pointer[Scalar[dtype], ImmutAnyOrigin], chunk: Int32) -> SIMD[
    dtype, _WIDTH
]:
    return row.unsafe_offset(Int(chunk) * _WIDTH).unsafe_load[
        width=_WIDTH, alignment=16
    ]()


@always_inline
def _batch[
    dtype: DType
](
    row: Pointer[Scalar[dtype], ImmutAnyOrigin], first: Int32, chunks: Int32
) -> StaticTuple[SIMD[dtype, _WIDTH], _UNROLL]:
    var batch = StaticTuple[SIMD[dtype, _WIDTH], _UNROLL](
        SIMD[dtype, _WIDTH](0)
    )
    comptime for i in range(_UNROLL):
        if first + Int32(32 * i) < chunks:
            batch[i] = _load(row, first + Int32(32 * i))
    return batch


@always_inline
def _at[
    dtype: DType
](
    vector: Pointer[Scalar[dtype], ImmutAnyOrigin],
    present: Int32,
    otherwise: Float32,
    chunk: Int32,
) -> _Vector:
    if present != 0:
        return _load(vector, chunk).cast[DType.float32]()
    return _Vector(otherwise)


@always_inline
def _fold_chunk[
    dtype: DType
](
    weight: SIMD[dtype, _WIDTH],
    scale: _Vector,
    centre: Float32,
    folded: Pointer[Scalar[dtype], MutAnyOrigin],
    chunk: Int32,
) -> _Vector:
    # Writes a chunk of the folded row and returns it as rounded.
    var rounded = (
        weight.cast[DType.float32]().fma(scale, _Vector(-centre)).cast[dtype]()
    )
    folded.unsafe_offset(Int(chunk) * _WIDTH).unsafe_store[
        width=_WIDTH, alignment=16
    ](rounded)
    return rounded.cast[DType.float32]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPS * 32)),
    `nvvm.minctasm`=SIMDLength(3),
)
@__name(t"fused_norm_fold_{dtype}_{affine_dtype}")
def fold_kernel[
    dtype: DType, affine_dtype: DType
](
    wc: Pointer[Scalar[dtype], MutAnyOrigin],
    s: Pointer[Float32, MutAnyOrigin],
    c: Pointer[Float32, MutAnyOrigin],
    w: Pointer[Scalar[dtype], ImmutAnyOrigin],
    gamma: Pointer[Scalar[affine_dtype], ImmutAnyOrigin],
    beta: Pointer[Scalar[affine_dtype], ImmutAnyOrigin],
    bias: Pointer[Scalar[dtype], ImmutAnyOrigin],
    n: Int32,
    k: Int32,
    has_gamma: Int32,
    has_beta: Int32,
    has_bias: Int32,
    centred: Int32,
):
    """Folds one row of the weight per warp.

    Parameters:
        dtype: Type of the weight and the bias.
        affine_dtype: Type of gamma and beta.

    Args:
        wc: Receives the folded weight [n, k].
        s: Receives the row sums of the folded weight [n].
        c: Receives the constants of the columns of y [n].
        w: The weight [n, k]; each row starts at a multiple of 16 bytes.
        gamma: Scale of the normalised features [k].
        beta: Shift of the normalised features [k].
        bias: Bias of the linear layer [n].
        n: Rows of the weight.
        k: Columns of the weight, a multiple of 8.
        has_gamma: Whether gamma is there; without it, ones.
        has_beta: Whether beta is there.
        has_bias: Whether the bias is there.
        centred: Whether the rows' means are taken out.
    """
    var index = Int(block_idx.x) * WARPS + Int(thread_idx.x) // 32
    if index >= Int(n):
        return
    var lane = Int32(thread_idx.x) % 32
    var row = w.unsafe_offset(index * Int(k))
    var folded = wc.unsafe_offset(index * Int(k))
    var chunks = k // _WIDTH

    var scaled_sum = _Vector(0)
    var beta_sum = _Vector(0)
    for batch in range(lane, chunks, 32 * _UNROLL):
        var weights = _batch(row, batch, chunks)
        comptime for i in range(_UNROLL):
            var chunk = batch + Int32(32 * i)
            if chunk < chunks:
                var weight = weights[i].cast[DType.float32]()
                scaled_sum = weight.fma(
                    _at(gamma, has_gamma, 1, chunk), scaled_sum
                )
                beta_sum = weight.fma(_at(beta, has_beta, 0, chunk), beta_sum)
    var centre = Float32(0)
    if centred != 0:
        centre = warp.sum(scaled_sum.reduce_add()) / Float32(k)
    var constant = Float32(0)
    if has_beta != 0:
        constant = warp.sum(beta_sum.reduce_add())

    var rounded_sum = _Vector(0)
    for batch in range(lane, chunks, 32 * _UNROLL):
        var weights = _batch(row, batch, chunks)
        comptime for i in range(_UNROLL):
            var chunk = batch + Int32(32 * i)
            if chunk < chunks:
                rounded_sum += _fold_chunk(
                    weights[i],
                    _at(gamma, has_gamma, 1, chunk),
                    centre,
                    folded,
                    chunk,
                )
    var total = warp.sum(rounded_sum.reduce_add())
    if lane == 0:
        if has_bias != 0:
            constant += (
                bias.unsafe_offset(index).unsafe_load().cast[DType.float32]()
            )
        s.unsafe_offset(index).unsafe_store(total)
        c.unsafe_offset(index).unsafe_store(constant)
