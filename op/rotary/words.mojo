"""Loads a GPU's numbers as words of 32 bits, which stay narrow until they are computed with."""

from max.gpu.memory import AddressSpace
from std.memory import bitcast
from std.sys import size_of

from ..rounding import rounded


@always_inline
def words_at[
    count: Int, alignment: Int
](address: Int) -> SIMD[DType.uint32, count]:
    """Loads words.

    Parameters:
        count: How many.
        alignment: Bytes that the address is a multiple of.

    Args:
        address: Where they are.

    Returns:
        The words.
    """
    return Pointer[UInt32, MutAnyOrigin, address_space=AddressSpace.GLOBAL](
        unsafe_from_address=address
    ).unsafe_load[width=count, alignment=alignment]()


@always_inline
def unpacked[
    dtype: DType, accum: DType, width: Int
](words: SIMD[DType.uint32, _]) -> SIMD[accum, width]:
    """Widens the numbers of some words: one instruction for each of bfloat16.

    Parameters:
        dtype: The type of the numbers.
        accum: The type computed in.
        width: How many there are.

    Args:
        words: What they were loaded as.

    Returns:
        The numbers.
    """
    comptime if dtype == DType.bfloat16 and accum == DType.float32:
        comptime Bits = SIMD[DType.uint32, width // 2]
        var bits = rebind[Bits](words)
        var low = bitcast[accum, width // 2](bits << Bits(16))
        var high = bitcast[accum, width // 2](bits & Bits(0xFFFF0000))
        return rebind[SIMD[accum, width]](low.interleave(high))
    else:
        return bitcast[dtype, width](words).cast[accum]()


@always_inline
def numbers_at[
    dtype: DType, accum: DType, width: Int
](address: Int, index: Int) -> SIMD[accum, width]:
    """Loads numbers that are aligned to all of their bytes, or to 16.

    Parameters:
        dtype: The type of the tensor.
        accum: The type computed in.
        width: How many.

    Args:
        address: Address of the tensor.
        index: Which is the first.

    Returns:
        The numbers.
    """
    comptime bytes = width * size_of[dtype]()
    return unpacked[dtype, accum, width](
        words_at[bytes // 4, min(16, bytes)](address + index * size_of[dtype]())
    )


@always_inline
def either_at[
    dtype: DType, accum: DType, width: Int
](address: Int, index: Int, is_float32: Bool) -> SIMD[accum, width]:
    """Loads numbers of one of two types; if one is bfloat16, without a branch, in which other loads would wait.

    Parameters:
        dtype: One of the types.
        accum: The type computed in.
        width: How many.

    Args:
        address: Address of the tensor.
        index: Which is the first.
        is_float32: Whether the tensor is float32 instead.

    Returns:
        The numbers.
    """
    comptime size = size_of[dtype]()
    comptime if dtype == DType.bfloat16 and accum == DType.float32:
        comptime count = width // 2
        comptime bytes = 4 * count
        var first = address + index * (4 if is_float32 else size)
        var lower = words_at[count, bytes](first)
        var upper = words_at[count, bytes](first + (bytes if is_float32 else 0))
        var own = unpacked[dtype, accum, width](lower)
        var wide = bitcast[accum, width](lower.join(upper))
        return wide if is_float32 else own
    else:
        if is_float32:
            return numbers_at[DType.float32, accum, width](address, index)
        return numbers_at[dtype, accum, width](address, index)


@always_inline
def store_at[
    accum: DType, width: Int, //, to: DType
](numbers: SIMD[accum, width], address: Int):
    """Stores numbers, rounded.

    Parameters:
        accum: The type computed in.
        width: How many.
        to: The type of the tensor.

    Args:
        numbers: The numbers.
        address: Where to, a multiple of all of their bytes.
    """
    Pointer[Scalar[to], MutAnyOrigin, address_space=AddressSpace.GLOBAL](
        unsafe_from_address=address
    ).unsafe_store[alignment=width * size_of[to]()](rounded[to](numbers))
