"""Rounds results of a CPU to the type that they are stored in, and widens operands."""

from std.memory import bitcast
from std.sys import CompilationTarget, is_gpu, size_of


@always_inline
def rounded[
    dtype: DType, //, to: DType
](value: SIMD[dtype, _]) -> SIMD[to, value.length]:
    """Rounds numbers to a type to the nearest, ties to even.

    Few CPUs have instructions that round to bfloat16, and those round subnormal numbers to zero; a function
    for each number, as a cast becomes otherwise, takes longer than all else in a pass. Integers do it.

    Parameters:
        dtype: The type of the numbers.
        to: The type to round to.

    Args:
        value: The numbers.

    Returns:
        The same, rounded.
    """
    comptime if (
        to == DType.bfloat16 and dtype == DType.float32 and not is_gpu()
    ):
        comptime Bits = SIMD[DType.uint32, value.length]
        var bits = bitcast[DType.uint32, value.length](value)
        var nearest = bits + Bits(0x7FFF) + ((bits >> Bits(16)) & Bits(1))
        # A NaN stays one, whatever its bits.
        var is_nan = (bits & Bits(0x7FFFFFFF)).gt(Bits(0x7F800000))
        var kept = is_nan.select(bits | Bits(0x400000), nearest)
        return bitcast[to, value.length](
            (kept >> Bits(16)).cast[DType.uint16]()
        )
    else:
        return value.cast[to]()


@always_inline
def widened[
    dtype: DType, //, to: DType
](value: SIMD[dtype, _]) -> SIMD[to, value.length]:
    """Widens numbers to a type that holds them all.

    Integers do it for bfloat16: the compiler sees through a cast, and compares what has been cast as bfloat16,
    for which it finds no instruction but one for each number.

    Parameters:
        dtype: The type of the numbers.
        to: The wider type.

    Args:
        value: The numbers.

    Returns:
        The same.
    """
    comptime if dtype == DType.bfloat16 and to == DType.float32:
        comptime Bits = SIMD[DType.uint32, value.length]
        var bits = bitcast[DType.uint16, value.length](value)
        return bitcast[to, value.length](bits.cast[DType.uint32]() << Bits(16))
    else:
        return value.cast[to]()


@always_inline
def converted[
    dtype: DType, //, to: DType
](value: SIMD[dtype, _]) -> SIMD[to, value.length]:
    """Converts numbers of a product: by instructions where the target has them, though they round subnormal
    numbers to zero, as PyTorch's products do.

    Parameters:
        dtype: The type of the numbers.
        to: The type to convert to.

    Args:
        value: The numbers.

    Returns:
        The same, rounded to the nearest if `to` is narrower.
    """
    comptime if CompilationTarget._has_feature["avx512bf16"]():
        return value.cast[to]()
    elif size_of[to]() < size_of[dtype]():
        return rounded[to](value)
    else:
        return widened[to](value)
