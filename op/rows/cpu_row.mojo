"""Runs a program on one row on a CPU.

Long sums are made of sums of blocks, so that their rounding errors are those of short ones.
"""

from std.math import align_up, ceildiv
from std.sys import simd_width_of, size_of
from std.utils import StaticTuple

from ..rounding import rounded, widened
from .operands import Operands, accumulator
from .program import RowProgram
from .types import BFLOAT16, FLOAT16
from .values import Row, Terms, Values

comptime _Pointer[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin]
comptime _UNROLL = 4
comptime _BLOCK = 1024


@always_inline
def _pointer[dtype: DType](address: Some[Intable]) -> _Pointer[dtype]:
    return _Pointer[dtype](unsafe_from_address=Int(address))


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """Which row is taken, and where its terms of sums over rows go."""

    var row: Int
    """The row's index."""
    var group: Int
    """Its group, whose features differ from those of others."""
    var parts: Int
    """The number of parts of the rows, each with separate partial sums."""
    var part: Int
    """The row's part."""


@always_inline
def _take_row[
    P: RowProgram, dtype: DType, ftype: DType
](operands: Operands[accumulator[dtype]()], place: Place):
    """Takes a row through all passes."""
    comptime accum = accumulator[dtype]()
    comptime width = simd_width_of[accum]()
    # without a reduction there are no chains of sums to run side by side
    comptime unroll = _UNROLL if P.passes > 0 else 1
    comptime step = width * unroll
    var length = Int(operands.length)
    var row = _row[P, dtype](operands, place.row)
    var totals = Terms[accum, 1](fill={})
    comptime for p in range(P.passes + 1):
        var sums = P.identities[accum, 1]()
        var column = 0
        var last = length
        var of_pass = row
        # What an estimate costs in float32's last digits is lost in a rounding to 2 bytes.
        comptime share = P.share_of(p) if size_of[dtype]() == 2 else 1
        comptime if share > 1:
            last = min(length, align_up(ceildiv(length, share), step))
            of_pass.n = Scalar[accum](last)
            of_pass.inverse_n = 1 / of_pass.n
        while column + step <= last:
            var blocks = StaticTuple[Terms[accum, width], unroll](
                fill=P.identities[accum, width]()
            )
            var end = min(last, column + _BLOCK * unroll)
            while column + step <= end:
                comptime for u in range(unroll):
                    var terms = _take[P, dtype, ftype, p, width](
                        operands, row, place, column + u * width, totals
                    )
                    blocks[u] = P.combine[p](blocks[u], terms)
                column += step
            comptime if unroll > 1:
                var block = P.combine[p](
                    P.combine[p](blocks[0], blocks[1]),
                    P.combine[p](blocks[2], blocks[3]),
                )
                sums = P.combine[p](sums, _across[P, p](block))
        while column + width <= last:
            var terms = _take[P, dtype, ftype, p, width](
                operands, row, place, column, totals
            )
            sums = P.combine[p](sums, _across[P, p](terms))
            column += width
        while column < last:
            var terms = _take[P, dtype, ftype, p, 1](
                operands, row, place, column, totals
            )
            sums = P.combine[p](sums, terms)
            column += 1
        comptime for s in range(P.stages):
            comptime if P.pass_of(s) == p:
                totals[s] = sums[s]
        P.finish[p](of_pass, totals)
    comptime for s in range(P.stages):
        comptime for r in range(P.Stages[s].results):
            comptime slot = P.results_before(s) + r
            if operands.results[slot] != 0:
                _pointer[accum](operands.results[slot]).unsafe_offset(
                    place.row
                ).unsafe_store(totals[s][r])


@always_inline
def _row[
    P: RowProgram, dtype: DType
](operands: Operands[accumulator[dtype]()], index: Int) -> Row[
    accumulator[dtype]()
]:
    """Reads what the stages may know of a row."""
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
        row.first[k] = _input[P, dtype, k, 1](operands, index, 0)
    comptime for k in range(P.saved):
        row.saved[k] = (
            _pointer[accum](operands.saved[k])
            .unsafe_offset(index)
            .unsafe_load()
        )
    comptime if P.parameter:
        if operands.parameter_is_float32:
            row.parameter = (
                _pointer[DType.float32](operands.parameter)
                .unsafe_load()
                .cast[accum]()
            )
        else:
            row.parameter = (
                _pointer[dtype](operands.parameter).unsafe_load().cast[accum]()
            )
    return row


@always_inline
def _input[
    P: RowProgram, dtype: DType, k: Int, width: Int
](operands: Operands[accumulator[dtype]()], row: Int, column: Int) -> SIMD[
    accumulator[dtype](), width
]:
    """Reads some elements of an input, with what is added to the first one."""
    comptime accum = accumulator[dtype]()
    comptime stride = 2 if k >= P.first_half_input else 1
    var value = widened[accum](
        _at[dtype](
            operands.inputs[k], row * stride * Int(operands.length) + column
        ).unsafe_load[width=width]()
    )
    comptime if P.has_residual and k == 0:
        value += widened[accum](
            _at[dtype](
                operands.residual, row * Int(operands.length) + column
            ).unsafe_load[width=width]()
        )
        return widened[accum](rounded[dtype](value))
    return value


@always_inline
def _at[dtype: DType](address: Int64, index: Int) -> _Pointer[dtype]:
    return _pointer[dtype](address).unsafe_offset(index)


@always_inline
def _take[
    P: RowProgram,
    dtype: DType,
    ftype: DType,
    pass_index: Int,
    width: Int,
](
    operands: Operands[accumulator[dtype]()],
    row: Row[accumulator[dtype]()],
    place: Place,
    column: Int,
    totals: Terms[accumulator[dtype](), 1],
) -> Terms[accumulator[dtype](), width]:
    """Takes some elements through a pass: returns their terms and, in the last pass, stores their outputs."""
    comptime accum = accumulator[dtype]()
    var length = Int(operands.length)
    var v = Values[accum, width]()
    comptime for k in range(P.inputs):
        v[k] = _input[P, dtype, k, width](operands, place.row, column)
    comptime if P.has_residual and pass_index == P.passes:
        if operands.sum != 0:
            _at[dtype](operands.sum, place.row * length + column).unsafe_store(
                rounded[dtype](v[0])
            )
    comptime for k in range(P.features):
        if operands.features[k] != 0:
            v[P.inputs + k] = (
                _at[ftype](
                    operands.features[k],
                    place.group * Int(operands.feature_pitch) + column,
                )
                .unsafe_load[width=width]()
                .cast[accum]()
            )
        else:
            v[P.inputs + k] = operands.absent[k].cast[accum]()
        comptime if k == 0:
            v[P.inputs] += operands.offset
    var terms = Terms[accum, width](fill={})
    v = P.visit[pass_index](row, v, totals, terms)
    comptime if pass_index == P.passes:
        comptime for k in range(P.outputs):
            if operands.outputs[k] != 0:
                _store[P, dtype, k](operands, place.row, column, v[k])
        comptime for c in range(P.columns):
            var sums = _at[accum](
                operands.column_sums,
                (c * place.parts + place.part) * length + column,
            )
            sums.unsafe_store(
                sums.unsafe_load[width=width]() + v[P.outputs + c]
            )
    return terms


@always_inline
def _store[
    P: RowProgram, dtype: DType, k: Int
](
    operands: Operands[accumulator[dtype]()],
    row: Int,
    column: Int,
    output: SIMD[accumulator[dtype](), _],
):
    """Stores some elements of an output, or adds them to what is there."""
    comptime accum = accumulator[dtype]()
    comptime stride = 2 if k >= P.first_half_output else 1
    var index = row * stride * Int(operands.length) + column
    var value = output
    comptime if P.has_addend and k == 0:
        value += (
            _at[dtype](operands.addend, index)
            .unsafe_load[width=output.length]()
            .cast[accum]()
        )
    comptime if dtype == DType.float32 and k >= P.first_narrow:
        if operands.narrow == BFLOAT16:
            _at[DType.bfloat16](operands.outputs[k], index).unsafe_store(
                rounded[DType.bfloat16](value)
            )
            return
        if operands.narrow == FLOAT16:
            _at[DType.float16](operands.outputs[k], index).unsafe_store(
                value.cast[DType.float16]()
            )
            return
    var address = _at[dtype](operands.outputs[k], index)
    comptime if P.primed:
        if operands.accumulate:
            value += address.unsafe_load[width=output.length]().cast[accum]()
    address.unsafe_store(rounded[dtype](value))


@always_inline
def _across[
    dtype: DType, width: Int, //, P: RowProgram, pass_index: Int
](terms: Terms[dtype, width]) -> Terms[dtype, 1]:
    """Reduces the terms of neighboring elements."""
    var sums = Terms[dtype, 1](fill={})
    comptime for s in range(P.stages):
        comptime if P.pass_of(s) == pass_index:
            comptime redo = P.Stages[s].redo
            var sum = Values[dtype, 1]()
            comptime for t in range(P.Stages[s].terms):
                sum[t] = materialize[redo]().across(terms[s][t])
            sums[s] = sum
    return sums
