"""A norm of two numbers in bfloat16, with the bits that every pass over the rows computes again."""

from std.memory import bitcast

from ..norms.norm import Norm

comptime Pair = SIMD[DType.float32, 2]
"""Two neighboring numbers."""


@always_inline
def widened_pair(word: UInt32) -> Pair:
    """Widens two numbers.

    Args:
        word: Two numbers in bfloat16, the first one low.

    Returns:
        The numbers.
    """
    return {
        bitcast[DType.float32](word << 16),
        bitcast[DType.float32](word & 0xFFFF0000),
    }


@always_inline
def normalized_pair[
    N: Norm
](x: UInt32, mean: Float32, rstd: Float32, gamma: Pair, beta: Pair) -> UInt32:
    """Normalizes two numbers and rounds them once. No rounding of it is left to the compiler.

    Parameters:
        N: The norm.

    Args:
        x: Two numbers in bfloat16, the first one low.
        mean: Of their row, if rows are centered.
        rstd: What their row is multiplied by.
        gamma: A factor for each number.
        beta: What is added to each. A -0 changes nothing, not even the sign of a zero.

    Returns:
        Two numbers in bfloat16.
    """
    var xhat = N.xhat[width=2](widened_pair(x), mean, rstd)
    return bitcast[DType.uint32, 1](
        xhat.fma(gamma, beta).cast[DType.bfloat16]()
    )
