"""Rounds to e4m3 and e5m2 on Hopper, and stores the results."""

from max.gpu.memory import AddressSpace
from std.sys import inlined_assembly


def largest[dtype: DType]() -> Float32:
    """Returns the largest finite number of a type.

    Parameters:
        dtype: Type float8_e4m3fn or float8_e5m2.

    Returns:
        The number.
    """
    return 448 if dtype == DType.float8_e4m3fn else 57344


@always_inline
def pack_eight_bits[dtype: DType](four: SIMD[DType.float32, 4]) -> UInt32:
    """Rounds to nearest, ties to even, and at most to the largest number; NaN stays NaN.

    Parameters:
        dtype: Type float8_e4m3fn or float8_e5m2.

    Args:
        four: The numbers.

    Returns:
        Their bytes, the first one lowest.
    """
    comptime e4m3 = StaticString(
        "{.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, $2, $1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;\nmov.b32 $0, {l, h};}"
    )
    comptime e5m2 = StaticString(
        "{.reg .b16 l, h;\ncvt.rn.satfinite.e5m2x2.f32 l, $2, $1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 h, $4, $3;\nmov.b32 $0, {l, h};}"
    )
    return inlined_assembly[
        e4m3 if dtype == DType.float8_e4m3fn else e5m2,
        UInt32,
        constraints="=r,f,f,f,f",
        has_side_effect=False,
    ](four[0], four[1], four[2], four[3])


@always_inline
def store_eight_bits[
    width: Int, //, dtype: DType
](address: Int, values: SIMD[DType.float32, width]):
    """Rounds and stores neighboring elements.

    Parameters:
        width: How many, 1 or a multiple of 4.
        dtype: Type float8_e4m3fn or float8_e5m2.

    Args:
        address: Where, a multiple of the width.
        values: The numbers.
    """
    comptime Bytes[dtype: DType] = Pointer[
        Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
    ]
    comptime if width < 4:
        comptime assert width == 1
        var word = pack_eight_bits[dtype]({values[0], 0, 0, 0})
        Bytes[DType.uint8](unsafe_from_address=address).unsafe_store(
            word.cast[DType.uint8]()
        )
    else:
        var words = SIMD[DType.uint32, width // 4]()
        comptime for i in range(width // 4):
            words[i] = pack_eight_bits[dtype](values.slice[4, offset=4 * i]())
        Bytes[DType.uint32](unsafe_from_address=address).unsafe_store[
            alignment=min(16, width)
        ](words)
