"""Quantizes rows to 8 bits, alone or as the end of a norm.

    scale = max(max |z|, 1e-12) / largest;  q = round(z / scale)

The scale is rounded up to a power of two where that is asked for; then z / scale is exact. The scale of a row with
a NaN or an infinity is not finite, and neither is any element of the row once it is dequantized.
"""

from std.memory import bitcast

from ..eight_bits import largest
from ..program import Program
from ..stage import Stage
from ..types import E4M3, eight_bit_type
from ..values import Redo, Row, Values
from .norm import _Affine, _CenterIfAsked, _Normalize

comptime POWER_OF_TWO = Int32(2)
"""The bit of `Row.kind` that asks for scales that are powers of two."""

comptime _LEAST = Float32(1e-12)


@always_inline
def scale_of[
    eight_bits: DType
](largest_here: Float32, power_of_two: Bool) -> Float32:
    """Returns the scale that brings numbers into the range of a type.

    Parameters:
        eight_bits: The type.

    Args:
        largest_here: The largest magnitude; NaN and infinity are kept.
        power_of_two: Whether it is rounded up to a power of two.

    Returns:
        The scale.
    """
    var bounded = _LEAST if largest_here < _LEAST else largest_here
    var scale = bounded / largest[eight_bits]()
    if not power_of_two:
        return scale
    var bits = bitcast[DType.uint32](scale)
    var exponent = bits >> 23
    # Below that of infinity and NaN.
    if bits & 0x7FFFFF != 0 and exponent < 255:
        bits = (exponent + 1) << 23
    return bitcast[DType.float32](bits)


@always_inline
def divided[
    width: Int, //
](
    z: SIMD[DType.float32, width],
    scale: SIMD[DType.float32, width],
    inverse: SIMD[DType.float32, width],
) -> SIMD[DType.float32, width]:
    """Divides with the bits of a division, by multiplications (Markstein); -0 stays -0.

    Parameters:
        width: How many.

    Args:
        z: What is divided.
        scale: What by.
        inverse: 1 / scale, rounded.

    Returns:
        The quotients.
    """
    var near = z * inverse
    var over = near.fma(scale, -z)
    return (-over).fma(inverse, near)


struct _Quantize[eight_bits: Int32](Stage):
    """(z, ...) -> z / scale, where the result is the scale."""

    comptime terms = 1
    comptime redo = Redo.MAX
    comptime results = 1

    @staticmethod
    @always_inline
    def map_in[
        dtype: DType, width: Int, //
    ](row: Row[dtype], v: Values[dtype, width]) -> Values[dtype, width]:
        return {abs(v[0])}

    @staticmethod
    @always_inline
    def finish[
        dtype: DType, //
    ](
        row: Row[dtype], total: Values[dtype, 1], before: Values[dtype, 1]
    ) -> Values[dtype, 1]:
        var scale = scale_of[eight_bit_type(Self.eight_bits)](
            total[0].cast[DType.float32](), row.kind & POWER_OF_TWO != 0
        )
        return {scale.cast[dtype](), (1 / scale).cast[dtype]()}

    @staticmethod
    @always_inline
    def map_out[
        dtype: DType, width: Int, //
    ](
        row: Row[dtype], v: Values[dtype, width], total: Values[dtype, 1]
    ) -> Values[dtype, width]:
        comptime Some = SIMD[DType.float32, width]
        return {
            divided(
                v[0].cast[DType.float32](),
                Some(total[0].cast[DType.float32]()),
                Some(total[1].cast[DType.float32]()),
            ).cast[dtype]()
        }


comptime Quantize[eight_bits: Int32] = Program[
    _Quantize[eight_bits], eight_bits_=eight_bits
]
"""From rows to 8 bits, with the result scale.

Parameters:
    eight_bits: The type, E4M3 or E5M2.
"""

comptime NormQuantize[has_residual: Bool = False] = Program[
    _CenterIfAsked,
    _Normalize,
    _Affine,
    _Quantize[E4M3],
    features_=2,
    has_residual_=has_residual,
    eight_bits_=E4M3,
]
"""From x, gamma, beta and the number eps to z in e4m3, with the results mean, rstd and scale.

Parameters:
    has_residual: Whether there is a residual.
"""
