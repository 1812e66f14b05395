"""Numbers of 16 bits that a thread loads together, as words of two."""

from max.gpu.memory import AddressSpace
from std.memory import bitcast

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
