"""Computes what stages need once a row."""

from std.math import sqrt


@always_inline
def inverse_sqrt[dtype: DType, //](a: Scalar[dtype]) -> Scalar[dtype]:
    """Returns 1 / sqrt(a) to the last bit or so, also for subnormal numbers.

    GPUs have an approximation that takes subnormal numbers for zero.

    Parameters:
        dtype: The type computed in.

    Args:
        a: The number.

    Returns:
        The inverse root; infinity for 0, NaN below.
    """
    comptime if dtype == DType.float32:
        var tiny = a < 7.888609052210118e-31
        var scaled = a * 1.8446744073709552e19 if tiny else a
        var guess = 1 / sqrt(scaled)
        var better = guess + guess * (0.5 - 0.5 * scaled * guess * guess)
        # 0 and infinity make the refinement NaN, and the guess is right
        guess = better if better == better else guess
        return guess * 4294967296.0 if tiny else guess
    else:
        return 1 / sqrt(a)
