"""Addresses of the puzzle's tensors."""

comptime Output[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin]
"""Points to the elements of a tensor to write.

Parameters:
    dtype: Type of the elements.
"""

comptime Input[dtype: DType] = Pointer[Scalar[dtype], ImmutAnyOrigin]
"""Points to the elements of a tensor to read.

Parameters:
    dtype: Type of the elements.
"""
