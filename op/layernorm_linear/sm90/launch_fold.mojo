"""Launch of the weight fold."""

from std.math import ceildiv

from ...device import Gpu
from .fold import WARPS, fold_kernel


def launch_fold[
    dtype: DType, affine_dtype: DType
](
    gpu: Gpu,
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
        gpu: Where to run.
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
    var kernel = gpu.context.compile_function[
        fold_kernel[dtype, affine_dtype]
    ]()
    gpu.stream.enqueue_function(
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
        grid_dim=ceildiv(n, WARPS),
        block_dim=WARPS * 32,
    )
