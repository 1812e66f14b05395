"""Numbers of 16 bits that a thread loads together, as words of two."""

from max.gpu.memory import AddressSpace
from std.memory import bitcast
from std.sys import inlined_assembly

comptime LOAD = 8
"""Elements that a thread loads together."""
comptime Words = SIMD[DType.uint32, 4]
"""What a thread loads together: pairs of numbers of 16 bits, the first one low."""
comptime Four = SIMD[DType.float32, 4]
"""The numbers in one half of each."""


@always_inline
def at[
    dtype: DType
](address: Int64, index: Int) -> Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
]:
    """Returns the place of an element in global memory.

    Parameters:
        dtype: The type.

    Args:
        address: Where the first one is.
        index: Which one.

    Returns:
        The place.
    """
    return Pointer[
        Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
    ](unsafe_from_address=Int(address)).unsafe_offset(index)


@always_inline
def load_words(address: Int64, index: Int) -> Words:
    """Loads numbers of 16 bits.

    Args:
        address: Where the first one is.
        index: Which one, a multiple of `LOAD`.

    Returns:
        Pairs of them.
    """
    return at[DType.uint32](address, index // 2).unsafe_load[
        width=4, alignment=16
    ]()


@always_inline
def low_halves(words: Words) -> Four:
    """Widens the first number of each pair.

    Args:
        words: Pairs in bfloat16.

    Returns:
        The numbers.
    """
    return bitcast[DType.float32, 4](words << Words(16))


@always_inline
def high_halves(words: Words) -> Four:
    """Widens the second number of each pair.

    Args:
        words: Pairs in bfloat16.

    Returns:
        The numbers.
    """
    return bitcast[DType.float32, 4](words & Words(0xFFFF0000))


@always_inline
def rounded_words(low: Four, high: Four) -> Words:
    """Rounds numbers to bfloat16.

    Args:
        low: The first number of each pair.
        high: The second number of each.

    Returns:
        The pairs.
    """
    var words = Words(0)
    comptime for i in range(LOAD // 2):
        words[i] = bitcast[DType.uint32, 1](
            SIMD[DType.float32, 2](low[i], high[i]).cast[DType.bfloat16]()
        )
    return words


@always_inline
def used_from_here(words: Words) -> Words:
    """Returns the same words, which no code before this widens.

    The compiler widens numbers once for all that use them, and out of a loop if it can. That takes twice the registers, and
    may have a block wait for these words before it reads what comes next.

    Args:
        words: Pairs of numbers.

    Returns:
        The same.
    """
    var same = words
    comptime for j in range(LOAD // 2):
        same[j] = inlined_assembly[
            "mov.b32 $0, $1;", UInt32, constraints="=r,r"
        ](words[j])
    return same
