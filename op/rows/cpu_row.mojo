"""Takes one row through a program on a CPU.

Long sums are made of sums of blocks, so that rounding errors stay those of short ones.
"""

from std.sys import simd_width_of
from std.utils import StaticTuple

from .operands import Operands, accumulator
from .program import RowProgram
from .values import Row, Terms, Values

comptime _Pointer[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin]
comptime _UNROLL = 4
comptime _BLOCK = 1024


@always_inline
def _pointer[dtype: DType](address: Some[Intable]) -> _Pointer[dtype]:
    return _Pointer[dtype](unsafe_from_address=Int(address))


@always_inline
def _take_row[
    P: RowProgram, dtype: DType, ftype: DType
](operands: Operands[accumulator[dtype]()], index: Int, parts: Int, part: Int):
    """Takes a row through all passes."""
    comptime accum = accumulator[dtype]()
    comptime width = simd_width_of[accum]()
    comptime step = width * _UNROLL
    var length = Int(operands.length)
    var row = _row[P, dtype](operands, index)
    var totals = Terms[accum, 1](fill={})
    comptime for p in range(P.passes + 1):
        var sums = P.identities[accum, 1]()
        var column = 0
        while column + step <= length:
            var blocks = StaticTuple[Terms[accum, width], _UNROLL](
                fill=P.identities[accum, width]()
            )
            var end = min(length, column + _BLOCK * _UNROLL)
            while column + step <= end:
                comptime for u in range(_UNROLL):
                    var terms = _take[P, dtype, ftype, p, width](
                        operands,
                        row,
                        index,
                        column + u * width,
                        totals,
                        parts,
                        part,
                    )
                    blocks[u] = P.combine[p](blocks[u], terms)
                column += step
            var block = P.combine[p](
                P.combine[p](blocks[0], blocks[1]),
                P.combine[p](blocks[2], blocks[3]),
            )
            sums = P.combine[p](sums, _across[P, p](block))
        while column + width <= length:
            var terms = _take[P, dtype, ftype, p, width](
                operands, row, index, column, totals, parts, part
            )
            sums = P.combine[p](sums, _across[P, p](terms))
            column += width
        while column < length:
            var terms = _take[P, dtype, ftype, p, 1](
                operands, row, index, column, totals, parts, part
            )
            sums = P.combine[p](sums, terms)
            column += 1
        comptime for s in range(P.stages):
            comptime if P.pass_of(s) == p:
                totals[s] = sums[s]
        P.finish[p](row, totals)
    comptime for s in range(P.stages):
        comptime for r in range(P.Stages[s].results):
            comptime slot = P.results_before(s) + r
            if operands.results[slot] != 0:
                _pointer[accum](operands.results[slot]).unsafe_offset(
                    index
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
        operands.n, operands.inverse_n, {}, {}, operands.number, 0
    )
    comptime for k in range(P.inputs):
        row.first[k] = (
            _pointer[dtype](operands.inputs[k])
            .unsafe_offset(index * Int(operands.length))
            .unsafe_load()
            .cast[accum]()
        )
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
def _take[
    P: RowProgram,
    dtype: DType,
    ftype: DType,
    pass_index: Int,
    width: Int,
](
    operands: Operands[accumulator[dtype]()],
    row: Row[accumulator[dtype]()],
    index: Int,
    column: Int,
    totals: Terms[accumulator[dtype](), 1],
    parts: Int,
    part: Int,
) -> Terms[accumulator[dtype](), width]:
    """Takes some elements through a pass: returns their terms and, in the last pass, stores their outputs."""
    comptime accum = accumulator[dtype]()
    var length = Int(operands.length)
    var place = index * length + column
    var v = Values[accum, width]()
    comptime for k in range(P.inputs):
        v[k] = (
            _pointer[dtype](operands.inputs[k])
            .unsafe_offset(place)
            .unsafe_load[width=width]()
            .cast[accum]()
        )
    comptime for k in range(P.features):
        if operands.features[k] != 0:
            v[P.inputs + k] = (
                _pointer[ftype](operands.features[k])
                .unsafe_offset(column)
                .unsafe_load[width=width]()
                .cast[accum]()
            )
        else:
            v[P.inputs + k] = operands.absent[k].cast[accum]()
    var terms = Terms[accum, width](fill={})
    v = P.visit[pass_index](row, v, totals, terms)
    comptime if pass_index == P.passes:
        comptime for k in range(P.outputs):
            if operands.outputs[k] != 0:
                var output = _pointer[dtype](operands.outputs[k]).unsafe_offset(
                    place
                )
                var value = v[k]
                comptime if P.primed:
                    if operands.accumulate:
                        value += output.unsafe_load[width=width]().cast[accum]()
                output.unsafe_store(value.cast[dtype]())
        comptime for c in range(P.columns):
            var sums = _pointer[accum](operands.column_sums).unsafe_offset(
                (c * parts + part) * length + column
            )
            sums.unsafe_store(
                sums.unsafe_load[width=width]() + v[P.outputs + c]
            )
    return terms


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
