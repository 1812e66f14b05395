"""Largest magnitudes in bfloat16, by their bits: these have the order of the numbers, with NaN last.

So an atomic maximum in any order gives the same result.
"""

from std.sys import inlined_assembly

comptime MAGNITUDES = UInt32(0x7FFF7FFF)
"""Clears the signs of two numbers."""


@always_inline
def keep_largest(maxima: Int64, index: Int, bits: UInt32):
    """Writes a maximum in place, on a GPU.

    Args:
        maxima: Address of the maxima, of 32 bits each, which are at least zero.
        index: Which one.
        bits: Those of a magnitude.
    """
    inlined_assembly[
        "red.relaxed.gpu.global.max.u32 [$0], $1;",
        NoneType,
        constraints="l,r,~{memory}",
    ](UInt64(maxima + Int64(4 * index)), bits)


@always_inline
def larger_halves(a: UInt32, b: UInt32) -> UInt32:
    """Compares the magnitudes in either half of two words, on a GPU.

    Args:
        a: Two magnitudes.
        b: Two more.

    Returns:
        The larger one of either half.
    """
    return inlined_assembly[
        "max.u16x2 $0, $1, $2;",
        UInt32,
        constraints="=r,r,r",
        has_side_effect=False,
    ](a, b)


@always_inline
def larger_half(bits: UInt32) -> UInt32:
    """Compares two magnitudes in one word.

    Args:
        bits: Both.

    Returns:
        The larger one.
    """
    return max(bits & 0xFFFF, bits >> 16)
