"""Loads and stores of a row in a GPU's memory, with conversions between its types and the type computed in."""

from max.gpu.memory import AddressSpace
from std.memory import bitcast
from std.sys import size_of

from .eight_bits import store_eight_bits
from .operands import Operands, accumulator
from .program import RowProgram
from .types import code_of, eight_bit_type
from .values import Row

comptime GlobalPointer[dtype: DType] = Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.GLOBAL
]
"""Points to memory of the GPU.

Parameters:
    dtype: The type of its elements.
"""


@always_inline
def widen[
    dtype: DType, width: Int, //, accum: DType
](value: SIMD[dtype, width]) -> SIMD[accum, width]:
    """Converts to the type computed in; bfloat16 with one instruction an element instead of two.

    Parameters:
        dtype: The type of the elements.
        width: Their number.
        accum: The type computed in.

    Args:
        value: The elements.

    Returns:
        The same in that type.
    """
    comptime if dtype == DType.bfloat16 and width > 1:
        var pairs = bitcast[DType.uint32, width // 2](value)
        var even = bitcast[DType.float32, width // 2](pairs << 16)
        var odd = bitcast[DType.float32, width // 2](pairs & 0xFFFF0000)
        return rebind[SIMD[accum, width]](even.interleave(odd))
    else:
        return value.cast[accum]()


@always_inline
def rounded_sum[
    dtype: DType, width: Int, //
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Adds in the type computed in, and rounds once.

    Parameters:
        dtype: The type of the elements.
        width: Their number.

    Args:
        a: The elements of one tensor.
        b: Those of the other.

    Returns:
        The sums.
    """
    comptime accum = accumulator[dtype]()
    return (widen[accum](a) + widen[accum](b)).cast[dtype]()


@doc_hidden
@always_inline
def load_row[
    P: RowProgram, dtype: DType
](operands: Operands[accumulator[dtype]()], index: Int) -> Row[
    accumulator[dtype]()
]:
    """Reads what the stages may know of a row; what they do not use is never loaded."""
    comptime accum = accumulator[dtype]()
    var row = Row[accum](
        operands.n,
        operands.inverse_n,
        {},
        {},
        operands.number,
        0,
        operands.kind,
    )
    comptime for k in range(P.inputs):
        comptime stride = 2 if k >= P.first_half_input else 1
        var first = (
            GlobalPointer[dtype](unsafe_from_address=Int(operands.inputs[k]))
            .unsafe_offset(index * stride * Int(operands.length))
            .unsafe_load()
        )
        comptime if P.has_residual and k == 0:
            first = rounded_sum[width=1](
                first,
                GlobalPointer[dtype](unsafe_from_address=Int(operands.residual))
                .unsafe_offset(index * Int(operands.length))
                .unsafe_load(),
            )
        row.first[k] = first.cast[accum]()
    comptime for k in range(P.saved):
        row.saved[k] = (
            GlobalPointer[accum](unsafe_from_address=Int(operands.saved[k]))
            .unsafe_offset(index)
            .unsafe_load()
        )
    comptime if P.parameter:
        if operands.parameter_is_float32:
            row.parameter = (
                GlobalPointer[DType.float32](
                    unsafe_from_address=Int(operands.parameter)
                )
                .unsafe_load()
                .cast[accum]()
            )
        else:
            row.parameter = (
                GlobalPointer[dtype](
                    unsafe_from_address=Int(operands.parameter)
                )
                .unsafe_load()
                .cast[accum]()
            )
    return row


@doc_hidden
@always_inline
def store_output[
    P: RowProgram, dtype: DType, k: Int, width: Int
](
    operands: Operands[accumulator[dtype]()],
    row: Int,
    column: Int32,
    output: SIMD[accumulator[dtype](), width],
):
    """Stores some elements of an output, or adds them to what is there."""
    comptime accum = accumulator[dtype]()
    comptime stride = 2 if k >= P.first_half_output else 1
    comptime alignment = width * size_of[dtype]()
    var index = row * stride * Int(operands.length) + Int(column)
    var value = output
    comptime if P.eight_bits != 0 and k == 0:
        store_eight_bits[eight_bit_type(P.eight_bits)](
            Int(operands.outputs[k]) + index, value.cast[DType.float32]()
        )
        return
    comptime if dtype == DType.float32 and k >= P.first_narrow:
        comptime for narrow in [DType.bfloat16, DType.float16]:
            if operands.narrow == code_of[narrow]():
                _at[narrow](operands.outputs[k], index).unsafe_store[
                    alignment=width * size_of[narrow]()
                ](value.cast[narrow]())
                return
    var address = _at[dtype](operands.outputs[k], index)
    comptime if P.primed:
        if operands.accumulate:
            value += address.unsafe_load[
                width=width, alignment=alignment
            ]().cast[accum]()
    address.unsafe_store[alignment=alignment](value.cast[dtype]())


@always_inline
def _at[dtype: DType](address: Int64, index: Int) -> GlobalPointer[dtype]:
    return GlobalPointer[dtype](unsafe_from_address=Int(address)).unsafe_offset(
        index
    )
