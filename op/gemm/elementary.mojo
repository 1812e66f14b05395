"""Elementary functions as activations need them: exponential, error function, reciprocal."""

from std.math import erf, exp, fma
from std.memory import bitcast
from std.sys import is_gpu, is_nvidia_gpu, llvm_intrinsic

comptime LOG2_E = 1.4426950408889634
"""Binary logarithm of e."""
comptime _LN2 = 0.69314718055994530942
# erf(x) / x = p(x^2) / q(x^2) up to the end, the highest powers first: the least relative error, 3e-8.
comptime _ERF_END = 3.9
comptime _ERF_P = [
    0.000229994557,
    0.00354000816,
    0.0513688019,
    0.188656153,
    1.12837914,
]
comptime _ERF_Q = [
    -1.13466559e-07,
    2.32407521e-05,
    0.00104514904,
    0.0143418293,
    0.112370451,
    0.500524647,
    1.0,
]
# e^r for |r| < 0.35, the highest powers first: within 2e-7 of itself without the first, and 7e-9 with it.
comptime _EXP = [
    1.0 / 5040,
    1.0 / 720,
    1.0 / 120,
    1.0 / 24,
    1.0 / 6,
    0.5,
    1.0,
    1.0,
]
comptime _SHORT_EXP = [1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0]
# ln 2 in two numbers, of which the first times a whole number is exact.
comptime _LN2_HIGH = 0.693145751953125
comptime _LN2_LOW = 1.42860682030941723212e-6
# The lowest exponent of e whose power is a normal number: smaller terms do not change a sum, and CPUs take a hundred
# cycles for each.
comptime _LOWEST = -87.0


@always_inline
def exponential[
    dtype: DType, width: Int, //, narrow: Bool
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns e^x for x up to 0: in float64, and in float32 on a CPU, to about the last bit; on a GPU to that of
    x log2(e); in fewer operations where the result is rounded to 16 bits next.

    Parameters:
        dtype: The type, float32 or float64.
        width: The number of elements.
        narrow: Whether the results are rounded to 16 bits next.

    Args:
        x: The elements.

    Returns:
        Their exponentials.
    """
    comptime Lanes = SIMD[dtype, width]
    comptime if dtype == DType.float64:
        return _power_of_float64(x)
    elif is_gpu():
        comptime assert dtype == DType.float32
        return rebind[Lanes](exp(rebind[SIMD[DType.float32, width]](x)))
    else:
        var n = round(x * LOG2_E)
        var power: Lanes
        comptime if narrow:
            power = _polynomial[_SHORT_EXP](fma(n, Lanes(-_LN2), x))
        else:
            var r = fma(n, Lanes(-_LN2_HIGH), x)
            power = _polynomial[_EXP](fma(n, Lanes(-_LN2_LOW), r))
        comptime Bits = SIMD[DType.int32, width]
        var scale = (n.cast[DType.int32]() + Bits(127)) << Bits(23)
        power *= bitcast[dtype, width](scale)
        # NaN compares false, and stays
        return x.lt(Lanes(_LOWEST)).select(Lanes(0), power)


@always_inline
def _power_of_float64[
    dtype: DType, width: Int, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns 2^n e^r for the whole number n that is nearest to x log2(e)."""
    comptime Lanes = SIMD[dtype, width]
    comptime terms = 14
    # NaN compares false, and stays
    var clamped = x.lt(Lanes(-746)).select(Lanes(-746), x)
    var n = round(clamped * LOG2_E)
    var r = fma(n, Lanes(-6.93147180369123816490e-01), clamped)
    r = fma(n, Lanes(-1.90821492927058770002e-10), r)
    # the series, for |r| < 0.35
    var power = Lanes(1)
    comptime for i in range(terms):
        power = fma(power * r, Lanes(1.0 / Float64(terms - i)), Lanes(1))
    # in two factors: 2^n may be too small for a normal number where e^x is none either
    comptime Bits = SIMD[DType.int64, width]
    var half = n.cast[DType.int64]() >> Bits(1)
    var rest = n.cast[DType.int64]() - half
    var one = bitcast[dtype, width]((half + Bits(1023)) << Bits(52))
    var other = bitcast[dtype, width]((rest + Bits(1023)) << Bits(52))
    return power * one * other


@always_inline
def error_function[
    dtype: DType, width: Int, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns erf(x) to the last bits, or nearly so where a CPU computes in float32.

    Parameters:
        dtype: The type, float32 or float64.
        width: The number of elements.

    Args:
        x: The elements.

    Returns:
        Their error function.
    """
    comptime assert dtype.is_floating_point(), "must be a floating-point type"
    comptime if dtype == DType.float32 and not is_gpu():
        return _error_function(x)
    else:
        return erf(x)


@always_inline
def _error_function[
    dtype: DType, width: Int, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns erf(x) within 3e-7, and within 3e-8 on average: one quotient for all x.

    The standard library's two formulas, of which each number needs one, take three times the operations.
    """
    comptime Lanes = SIMD[dtype, width]
    var t = x * x
    # NaN compares false, and stays
    var error = x.lt(Lanes(-_ERF_END)).select(
        Lanes(-1), x * _polynomial[_ERF_P](t) / _polynomial[_ERF_Q](t)
    )
    return x.gt(Lanes(_ERF_END)).select(Lanes(1), error)


@always_inline
def _polynomial[
    dtype: DType, width: Int, size: Int, //, factors: Array[Float64, size]
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Sums powers of x, the highest first."""
    comptime highest = factors[0]
    var sum = SIMD[dtype, width](highest)
    comptime for i in range(1, size):
        comptime factor = factors[i]
        sum = fma(sum, x, SIMD[dtype, width](factor))
    return sum


@always_inline
def reciprocal[
    dtype: DType, width: Int, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns 1 / x on a GPU, off by a unit in the last place at most.

    Parameters:
        dtype: The type, float32.
        width: The number of elements.

    Args:
        x: The elements.

    Returns:
        Their reciprocals.
    """
    comptime if is_nvidia_gpu():
        var result = SIMD[dtype, width]()
        comptime for i in range(width):
            result[i] = rebind[Scalar[dtype]](
                llvm_intrinsic[
                    "llvm.nvvm.rcp.approx.ftz.f", Float32, has_side_effect=False
                ](rebind[Float32](x[i]))
            )
        return result
    else:
        return 1 / x
