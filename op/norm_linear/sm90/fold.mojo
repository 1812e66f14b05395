"""A norm folded into a weight: what is multiplied by x as it is, and what goes with it.

    folded = round(weight gamma - its row's mean);  s = row sums of folded;  c = bias + weight beta
"""

from std.math import ceildiv
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.primitives import warp

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.activation import GATED
from ...norms.norm import Norm

# Warps of a block, each of which takes a row.
comptime _WARPS = 8
comptime _WIDTH = 8
# Loads in flight at once; the second pass finds the row in the L2 cache, which
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
    offset: Float32 = 0,
) -> _Vector:
    if present != 0:
        return _load(vector, chunk).cast[DType.float32]() + offset
    return _Vector(otherwise)


@always_inline
def _fold_chunk[
    dtype: DType, //, N: Norm
](
    weight: SIMD[dtype, _WIDTH],
    gamma: _Vector,
    center: Float32,
    folded: Pointer[Scalar[dtype], MutAnyOrigin],
    chunk: Int32,
) -> _Vector:
    # Writes a chunk of the folded row and returns it as rounded.
    var rounded = N.fold[_WIDTH](
        weight.cast[DType.float32](), gamma, center
    ).cast[dtype]()
    folded.unsafe_offset(Int(chunk) * _WIDTH).unsafe_store[
        width=_WIDTH, alignment=16
    ](rounded)
    return rounded.cast[DType.float32]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_WARPS * 32)),
    `nvvm.minctasm`=SIMDLength(3),
)
@__name(t"fused_norm_fold_{dtype}_{norm_dtype}")
def fold_kernel[
    dtype: DType, norm_dtype: DType, N: Norm
](
    folded: Pointer[Scalar[dtype], MutAnyOrigin],
    s: Pointer[Float32, MutAnyOrigin],
    c: Pointer[Float32, MutAnyOrigin],
    weight: Pointer[Scalar[dtype], ImmutAnyOrigin],
    gamma: Pointer[Scalar[norm_dtype], ImmutAnyOrigin],
    beta: Pointer[Scalar[norm_dtype], ImmutAnyOrigin],
    bias: Pointer[Scalar[dtype], ImmutAnyOrigin],
    up: Pointer[Scalar[dtype], ImmutAnyOrigin],
    up_bias: Pointer[Scalar[dtype], ImmutAnyOrigin],
    gates: Int32,
    n: Int32,
    k: Int32,
    has_gamma: Int32,
    has_beta: Int32,
    has_bias: Int32,
    offset: Float32,
):
    """Folds one row of the weight for each warp.

    Grid: rows / _WARPS. Block: _WARPS warps.

    Parameters:
        dtype: Type of the weight and the bias.
        norm_dtype: Type of gamma and beta.
        N: The norm.

    Args:
        folded: Receives the folded weight [N, K].
        s: Receives the row sums of the folded weight [N].
        c: Receives the constants of the columns of y [N].
        weight: The weight [N, K]; each row starts at a multiple of 16 bytes.
        gamma: Scale of the normalized features [K].
        beta: Shift of the normalized features [K].
        bias: Bias of the linear layer [N].
        up: The weight that the first one gates, of the same size, if it is a gate.
        up_bias: Bias of that.
        gates: Whether it is one: eight rows of the weight and eight of the other then alternate.
        n: Rows of the folded weight.
        k: Columns of the weight, a multiple of 8.
        has_gamma: Whether there is a gamma; ones stand for none.
        has_beta: Whether there is a beta.
        has_bias: Whether there is a bias.
        offset: Added to gamma, if there is one.
    """
    var index = Int(block_idx.x) * _WARPS + Int(thread_idx.x) // 32
    if index >= Int(n):
        return
    var lane = Int32(thread_idx.x) % 32
    var source = index
    var its_weight = weight
    var its_bias = bias
    if gates != 0:
        source = index // 16 * 8 + index % 8
        if index % 16 >= 8:
            its_weight = up
            its_bias = up_bias
    var row = its_weight.unsafe_offset(source * Int(k))
    var folded_row = folded.unsafe_offset(index * Int(k))
    var chunks = k // _WIDTH

    var scaled_sum = _Vector(0)
    var beta_sum = _Vector(0)
    for batch in range(lane, chunks, 32 * _UNROLL):
        var weights = _batch(row, batch, chunks)
        comptime for i in range(_UNROLL):
            var chunk = batch + Int32(32 * i)
            if chunk < chunks:
                var own = weights[i].cast[DType.float32]()
                scaled_sum = own.fma(
                    _at(gamma, has_gamma, 1, chunk, offset), scaled_sum
                )
                beta_sum = own.fma(_at(beta, has_beta, 0, chunk), beta_sum)
    var center = Float32(0)
    comptime if N.has_mean:
        center = warp.sum(scaled_sum.reduce_add()) / Float32(k)
    var constant = Float32(0)
    if has_beta != 0:
        constant = warp.sum(beta_sum.reduce_add())

    var rounded_sum = _Vector(0)
    for batch in range(lane, chunks, 32 * _UNROLL):
        var weights = _batch(row, batch, chunks)
        comptime for i in range(_UNROLL):
            var chunk = batch + Int32(32 * i)
            if chunk < chunks:
                rounded_sum += _fold_chunk[N](
                    weights[i],
                    _at(gamma, has_gamma, 1, chunk, offset),
                    center,
                    folded_row,
                    chunk,
                )
    var total = warp.sum(rounded_sum.reduce_add())
    if lane == 0:
        if has_bias != 0:
            constant += (
                its_bias.unsafe_offset(source)
                .unsafe_load()
                .cast[DType.float32]()
            )
        s.unsafe_offset(index).unsafe_store(total)
        c.unsafe_offset(index).unsafe_store(constant)


def products(call: Call) -> Int:
    """Counts the rows of all weights that multiply the norm's rows.

    Args:
        call: The call.

    Returns:
        Its outputs, and as many again before a gate.
    """
    return call.N * (2 if call.activation >= GATED else 1)


def launch_fold[
    dtype: DType, N: Norm
](gpu: Gpu, call: Call, folded: Int, sums: Int, constants: Int) raises:
    """Queues the fold of a call's parameters.

    Parameters:
        dtype: Type of the weight and the bias.
        N: The norm.

    Args:
        gpu: Where to run.
        call: The parameters; K is a multiple of 8, and weight, gamma and beta
            start at multiples of 16 bytes.
        folded: Address of the folded weight [N, K]; before a gate all sizes are of 2N.
        sums: Address of its row sums [N].
        constants: Address of the columns' constants [N].

    Raises:
        If the driver refuses.
    """
    comptime Weight = Pointer[Scalar[dtype], ImmutAnyOrigin]
    var gates = call.activation >= GATED
    var rows = products(call)
    comptime for is_float32 in [False, True]:
        if (call.norm_is_float32 != 0) == is_float32:
            comptime norm_dtype = DType.float32 if is_float32 else dtype
            comptime Affine = Pointer[Scalar[norm_dtype], ImmutAnyOrigin]
            var kernel = gpu.context.compile_function[
                fold_kernel[dtype, norm_dtype, N]
            ]()
            gpu.stream.enqueue_function(
                kernel,
                Pointer[Scalar[dtype], MutAnyOrigin](
                    unsafe_from_address=folded
                ),
                Pointer[Float32, MutAnyOrigin](unsafe_from_address=sums),
                Pointer[Float32, MutAnyOrigin](unsafe_from_address=constants),
                Weight(unsafe_from_address=call.weight),
                Affine(unsafe_from_address=call.gamma),
                Affine(unsafe_from_address=call.beta),
                Weight(unsafe_from_address=call.bias),
                Weight(unsafe_from_address=call.up),
                Weight(unsafe_from_address=call.up_bias),
                Int32(gates),
                Int32(rows),
                Int32(call.K),
                Int32(call.gamma != 0),
                Int32(call.beta != 0),
                Int32(call.bias != 0),
                call.weight_offset.cast[DType.float32](),
                grid_dim=ceildiv(rows, _WARPS),
                block_dim=_WARPS * 32,
            )


def fold[dtype: DType, N: Norm](launcher: Launcher, call: Call) raises:
    """Queues the fold of a call's parameters into the memory that it names.

    Parameters:
        dtype: Type of the weight and the bias.
        N: The norm.

    Args:
        launcher: Where to run.
        call: The parameters, as for `launch_fold`.

    Raises:
        If the driver refuses.
    """
    launch_fold[dtype, N](
        launcher.gpu,
        call,
        call.fold_weight,
        call.fold_sums,
        call.fold_constants,
    )
