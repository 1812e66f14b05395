"""A norm folded into a weight: the matrix that is multiplied by x itself, and the constants that complete the norm.

    folded = round(weight gamma - its row's mean);  s = row sums of folded;  c = bias + weight beta
"""

from std.math import align_up, ceildiv

from ...call import Call
from ...device import Gpu, Launcher
from ...gemm.activation import GATED
from ...norms.norm import Norm
from ...pdl import pdl_attributes
from .fold_kernel import LOADS, WIDTH, FoldShape, fold_kernel

# A group holds two rows; a float32 gamma and beta take more registers.
comptime _SHORT = [FoldShape(2, 256, 4), FoldShape(2, 256, 3)]
comptime _LONG = [FoldShape(2, 1024, 1), FoldShape(2, 768, 1)]


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
        call: The parameters; K is a multiple of 8, N is at least 8, and weights, gamma and beta
            start at multiples of 16 bytes. K of 0 is for an RMSNorm whose constants alone are wanted.
        folded: Address of the folded weight [N, K]; before a gate all sizes are of 2N.
        sums: Address of its row sums [N].
        constants: Address of the columns' constants [N].

    Raises:
        If the driver refuses.
    """
    comptime Weight = Pointer[Scalar[dtype], MutAnyOrigin]
    var gates = call.activation >= GATED
    var rows = products(call)
    var loads = ceildiv(call.K, WIDTH * LOADS)
    comptime for is_float32 in [False, True]:
        comptime most = _LONG[Int(is_float32)].threads
        var group = min(align_up(max(loads, 1), 32), most)
        comptime for is_long in [False, True]:
            comptime short = _SHORT[Int(is_float32)]
            comptime shape = _LONG[Int(is_float32)] if is_long else short
            if (call.norm_is_float32 != 0) == is_float32 and (
                group > short.threads
            ) == is_long:
                var groups = max(short.threads // group, 1)
                comptime norm_dtype = DType.float32 if is_float32 else dtype
                comptime Affine = Pointer[Scalar[norm_dtype], MutAnyOrigin]
                var kernel = gpu.context.compile_function[
                    fold_kernel[dtype, norm_dtype, N, shape]
                ]()
                gpu.stream.enqueue_function(
                    kernel,
                    Pointer[Scalar[dtype], MutAnyOrigin](
                        unsafe_from_address=folded
                    ),
                    Pointer[Float32, MutAnyOrigin](unsafe_from_address=sums),
                    Pointer[Float32, MutAnyOrigin](
                        unsafe_from_address=constants
                    ),
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
                    grid_dim=ceildiv(rows, groups * shape.rows),
                    block_dim=(group, groups),
                    attributes=pdl_attributes(),
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
