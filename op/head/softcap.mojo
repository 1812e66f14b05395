"""Logits that tanh limits to a cap: cap tanh(z / cap), and its slope.

With u = exp(-2 |z| / cap), tanh(|z| / cap) = (1 - u) / (1 + u), and the slope 1 - tanh^2 is 4 u / (1 + u)^2, exact where
tanh itself rounds to 1. Rows' sums take the exponential of what is limited; the product's epilogue stores that times
the slope, as the slope cannot be had of a rounded exponential. So both gradients remain plain products.
"""

from std.math import exp

from ..gemm.elementary import reciprocal


@always_inline
def _fell[
    width: Int
](z: SIMD[DType.float32, width], cap: Float32) -> SIMD[DType.float32, width]:
    return exp(abs(z) * (-2 / cap))


@always_inline
def capped[
    width: Int
](z: SIMD[DType.float32, width], cap: Float32) -> SIMD[DType.float32, width]:
    """Limits logits.

    Parameters:
        width: How many.

    Args:
        z: The logits.
        cap: What they are limited to.

    Returns:
        The cap times tanh of their share of it.
    """
    var u = _fell[width](z, cap)
    var size = cap * (1 - u) * reciprocal(1 + u)
    return z.lt(0).select(-size, size)


@always_inline
def slope[
    width: Int
](z: SIMD[DType.float32, width], cap: Float32) -> SIMD[DType.float32, width]:
    """Differentiates limited logits.

    Parameters:
        width: How many.

    Args:
        z: The logits, before they are limited.
        cap: What they are limited to.

    Returns:
        The derivatives by z.
    """
    var u = _fell[width](z, cap)
    var share = reciprocal(1 + u)
    return 4 * u * share * share
