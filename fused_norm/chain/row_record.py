"""The record of a row op's call: `RowCall` in op/rows/op.mojo, number by number.

A record is a view of 14 integers. Those left alone are 0, for what is not there or not wanted.
"""

from __future__ import annotations

import ctypes

# Where each field begins: outputs are two addresses, inputs three.
M, K, CONTEXT, THREADS, ACCUMULATE, PARAMETER, PARAMETER_IS_FLOAT32 = range(7)
PARAMETER_GRADIENT, WORKSPACE, OUTPUTS, _, INPUTS = range(7, 12)

_Numbers = ctypes.c_int64 * 14


def new_record() -> tuple[memoryview, int]:
    """Return a record and its address, which holds as long as the record is kept."""
    numbers = _Numbers()
    # Setting a field through a view takes half as long as through ctypes.
    return memoryview(numbers).cast("B").cast("q"), ctypes.addressof(numbers)
