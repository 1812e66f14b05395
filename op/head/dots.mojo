"""Shared by the head's kernels: dot products of two rows by a warp, and which sums of exponentials are safe."""

from max.gpu.primitives import warp

comptime WIDTH = 8
"""Elements of a load."""
comptime THREADS = 256
"""Threads of a block of these kernels."""
comptime WARPS = THREADS // 32
"""Its warps."""
comptime LOWEST = Float32(-3.0e38)
"""Less than any logit."""

# A sum of exponentials, each rounded by its own size, is exact enough anywhere in here.
comptime _LEAST = Float32(1e-30)
comptime _MOST = Float32(1e30)


@always_inline
def elements[
    dtype: DType
](address: Int64, index: Int) -> Pointer[Scalar[dtype], MutAnyOrigin]:
    """Locates an element of a tensor.

    Parameters:
        dtype: Type of the elements.

    Args:
        address: Address of the tensor.
        index: Which element.

    Returns:
        The element.
    """
    return Pointer[Scalar[dtype], MutAnyOrigin](
        unsafe_from_address=Int(address)
    ).unsafe_offset(index)


@always_inline
def is_bad(sum: Float32) -> Bool:
    """Tells whether exponentials less this offset are too large or too small to be used.

    Args:
        sum: Their sum.

    Returns:
        Whether they are; those that are no numbers are as they should be.
    """
    return sum > _MOST or sum < _LEAST


@always_inline
def dot(
    a: Pointer[BFloat16, MutAnyOrigin],
    b: Pointer[BFloat16, MutAnyOrigin],
    count: Int,
    lane: Int,
) -> Float32:
    """Multiplies two rows, by a warp.

    Args:
        a: One row, at a multiple of 16 bytes.
        b: The other.
        count: Their elements, a multiple of `WIDTH`.
        lane: Lane of the thread.

    Returns:
        The sum of the products, the same in all lanes.
    """
    var sums = SIMD[DType.float32, WIDTH](0)
    for at in range(lane * WIDTH, count, 32 * WIDTH):
        var left = a.unsafe_offset(at).unsafe_load[width=WIDTH, alignment=16]()
        var right = b.unsafe_offset(at).unsafe_load[width=WIDTH, alignment=16]()
        sums = left.cast[DType.float32]().fma(right.cast[DType.float32](), sums)
    return warp.sum(sums.reduce_add())
