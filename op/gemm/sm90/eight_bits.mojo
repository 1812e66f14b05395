"""Operands of 8 bits: e4m3 or e5m2 on the left, e4m3 on the right, and a product of 16 bits.

Both are stored along K: the instruction has no transposed operands of 8 bits.
"""

from std.sys import size_of


def is_eight_bits[dtype: DType]() -> Bool:
    """Tells whether the operands have 8 bits.

    Parameters:
        dtype: Type of the left one.

    Returns:
        Whether they have.
    """
    return size_of[dtype]() == 1


def right_type[dtype: DType]() -> DType:
    """Returns the type of the right operand.

    Parameters:
        dtype: Type of the left one.

    Returns:
        That type, or e4m3 if the left one has 8 bits.
    """
    return DType.float8_e4m3fn if is_eight_bits[dtype]() else dtype


def result_type[dtype: DType]() -> DType:
    """Returns the type of the product, of an addend and of h.

    Parameters:
        dtype: Type of the left operand.

    Returns:
        That type, or bfloat16 for 8 bits.
    """
    return DType.bfloat16 if is_eight_bits[dtype]() else dtype
