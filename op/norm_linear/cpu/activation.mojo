"""The activations by their numbers in the record, in vectors of sums."""

from std.ffi import external_call
from std.math import erf, exp
from std.utils.numerics import inf

from ...call import Call

comptime RELU = 1
"""The larger of h and 0."""
comptime GELU = 2
"""Product h Phi(h) with the normal distribution's Phi, by erf."""
comptime GELU_TANH = 3
"""The same with Phi approximated by tanh."""
comptime QUICK_GELU = 4
"""The same with Phi approximated by sigmoid(1.702 h)."""
comptime SILU = 5
"""Product h sigmoid(h)."""
comptime GATED = 8
"""Added to a number where the first half of the columns, activated, multiplies the second."""


@always_inline
def is_activation(number: Int) -> Bool:
    """Says whether there is an activation of this number.

    Args:
        number: That in the record, not 0.

    Returns:
        Whether there is.
    """
    return RELU <= number % GATED <= SILU and number < 2 * GATED


def before_activation(call: Call) -> Call:
    """Returns the backward of the norm and the Linear layer alone, given the gradient of their product.

    Args:
        call: The backward. With an activation, dh has been made from da.

    Returns:
        One without an activation, on as many outputs as the product has.
    """
    var linear = call
    if call.activation != 0:
        linear.dy = call.dh
        linear.N *= 2 if call.activation >= GATED else 1
        linear.activation = 0
    return linear


@always_inline
def activated[
    dtype: DType, width: Int, //, kind: Int
](h: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Applies an activation.

    Parameters:
        dtype: The type of sums.
        width: Number of lanes.
        kind: Its number, without a gate.

    Args:
        h: The vector.

    Returns:
        The activated vector; NaN where PyTorch's is NaN.
    """
    comptime if kind == RELU:
        return h.lt(0).select(SIMD[dtype, width](0), h)
    elif kind == GELU:
        return 0.5 * h * (1 + _erf(h * 0.7071067811865476))
    elif kind == GELU_TANH:
        # (1 + tanh u) / 2 = sigmoid(2 u), which loses nothing below 0
        var u = 0.7978845608028654 * (h + 0.044715 * h * h * h)
        return _times_sigmoid(h, 2 * u)
    elif kind == QUICK_GELU:
        return _times_sigmoid(h, 1.702 * h)
    else:
        comptime assert kind == SILU, "an activation of that number"
        return _times_sigmoid(h, h)


@always_inline
def _times_sigmoid[
    dtype: DType, width: Int, //
](h: SIMD[dtype, width], u: SIMD[dtype, width]) -> SIMD[dtype, width]:
    return h / (1 + _exp(-u))


@always_inline
def _erf[
    dtype: DType, width: Int, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    comptime Result = SIMD[dtype, width]
    comptime if dtype == DType.float64:
        return rebind[Result](erf(rebind[SIMD[DType.float64, width]](x)))
    else:
        return rebind[Result](erf(rebind[SIMD[DType.float32, width]](x)))


@always_inline
def _exp[
    dtype: DType, width: Int, //
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    comptime if dtype == DType.float64:
        # That of Mojo is little more precise than float32.
        var result = SIMD[dtype, width](0)
        comptime for i in range(width):
            result[i] = external_call["exp", Scalar[dtype]](x[i])
        return result
    else:
        # Mojo's stops there, where infinity is what makes h / (1 + e) vanish.
        return x.gt(88.37626).select(
            SIMD[dtype, width](inf[dtype]()),
            rebind[SIMD[dtype, width]](
                exp(rebind[SIMD[DType.float32, width]](x))
            ),
        )
