"""Scales of numbers that are stored in 8 bits on Hopper.

    scale = max(max |z|, 1e-12) / largest;  q = round(z / scale)
"""

from max.gpu.primitives import warp
from std.memory import bitcast

from .eight_bits import largest

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


@always_inline
def magnitude_bits(values: SIMD[DType.float32, _]) -> UInt32:
    """Returns the bits of the largest magnitude, whose order is that of the numbers, NaN last.

    Args:
        values: The numbers.

    Returns:
        The bits.
    """
    comptime Bits = SIMD[DType.uint32, values.length]
    var bits = bitcast[DType.uint32, values.length](values)
    return (bits & Bits(0x7FFFFFFF)).reduce_max()


@always_inline
def largest_of_block(bits: UInt32) -> UInt32:
    """Returns the largest bits that 16 neighboring lanes have: with 8 elements each, those of 128. All lanes of a warp call it.

    Args:
        bits: Those of this lane.

    Returns:
        The bits.
    """
    var most = bits
    comptime for distance in [1, 2, 4, 8]:
        most = max(most, warp.shuffle_xor(most, UInt32(distance)))
    return most
