"""Types by number, for those known only at run time."""

from max.gpu.memory import AddressSpace

comptime FLOAT32 = Int32(0)
"""Stands for float32."""
comptime BFLOAT16 = Int32(1)
"""Stands for bfloat16."""
comptime FLOAT16 = Int32(2)
"""Stands for float16."""
comptime FLOAT64 = Int32(3)
"""Stands for float64."""

comptime E4M3 = Int32(4)
"""Stands for float8_e4m3fn, which only kernels that quantize store."""
comptime E5M2 = Int32(5)
"""Stands for float8_e5m2, likewise."""


def eight_bit_type(code: Int32) -> DType:
    """Returns the type that E4M3 or E5M2 stands for.

    Args:
        code: One of the two.

    Returns:
        The type.
    """
    return DType.float8_e4m3fn if code == E4M3 else DType.float8_e5m2


def code_of[dtype: DType]() -> Int32:
    """Returns the number of a type.

    Parameters:
        dtype: The type, float32, bfloat16, float16 or float64.

    Returns:
        Its number.
    """
    comptime if dtype == DType.bfloat16:
        return BFLOAT16
    elif dtype == DType.float16:
        return FLOAT16
    elif dtype == DType.float64:
        return FLOAT64
    else:
        comptime assert dtype == DType.float32
        return FLOAT32


@always_inline
def store_as[
    dtype: DType, space: AddressSpace = AddressSpace.GENERIC
](code: Int32, address: Int64, index: Int, value: Scalar[dtype]):
    """Stores a number in a type known only at run time.

    Parameters:
        dtype: The type of the number.
        space: Where the memory is.

    Args:
        code: The number of the type to store.
        address: Where the vector starts.
        index: Which of its elements.
        value: The number.
    """
    if code == FLOAT32:
        _store[DType.float32, space](address, index, value)
    elif code == BFLOAT16:
        _store[DType.bfloat16, space](address, index, value)
    elif code == FLOAT16:
        _store[DType.float16, space](address, index, value)
    else:
        _store[DType.float64, space](address, index, value)


@always_inline
def _store[
    dtype: DType, space: AddressSpace
](address: Int64, index: Int, value: Scalar[_]):
    Pointer[Scalar[dtype], MutAnyOrigin, address_space=space](
        unsafe_from_address=Int(address)
    ).unsafe_offset(index).unsafe_store(value.cast[dtype]())


@always_inline
def load_as[
    dtype: DType, space: AddressSpace = AddressSpace.GENERIC
](code: Int32, address: Int64, index: Int) -> Scalar[dtype]:
    """Loads a number of a type known only at run time.

    Parameters:
        dtype: The type to return.
        space: Where the memory is.

    Args:
        code: The number of the type of the vector.
        address: Where it starts.
        index: Which of its elements.

    Returns:
        The number.
    """
    if code == FLOAT32:
        return _load[DType.float32, space](address, index).cast[dtype]()
    if code == BFLOAT16:
        return _load[DType.bfloat16, space](address, index).cast[dtype]()
    if code == FLOAT16:
        return _load[DType.float16, space](address, index).cast[dtype]()
    return _load[DType.float64, space](address, index).cast[dtype]()


@always_inline
def _load[
    dtype: DType, space: AddressSpace
](address: Int64, index: Int) -> Scalar[dtype]:
    return (
        Pointer[Scalar[dtype], MutAnyOrigin, address_space=space](
            unsafe_from_address=Int(address)
        )
        .unsafe_offset(index)
        .unsafe_load()
    )
