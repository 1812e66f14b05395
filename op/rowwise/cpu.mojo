"""Runs a row program on a CPU: SIMD along the row, rows shared among PyTorch's threads.

A row is read again in each pass: it is in the cache, and the stages cost less than storing what they return.
Long sums are made of sums of blocks, so that rounding errors stay those of short ones.
"""

from std.math import ceildiv
from std.memory import OpaquePointer
from std.sys import simd_width_of, size_of
from std.utils import StaticTuple

from op.pages import prefer_large_pages
from op.team import Data, Team

from .operands import Addresses, Operands, RowTarget, accumulator
from .program import CAPACITY, Redo, Row, RowProgram, Terms, Values

comptime _Pointer[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin]

comptime _UNROLL = 4
comptime _BLOCK = 1024
comptime _PART_ELEMENTS = 1 << 15
comptime _MAX_PARTS = 64
comptime _FINISH_COLUMNS = 512


@always_inline
def _pointer[dtype: DType](address: Int64) -> _Pointer[dtype]:
    return _Pointer[dtype](unsafe_from_address=Int(address))


@fieldwise_init
struct Cpu(Copyable, Movable, RowTarget):
    """The CPU and the threads to use."""

    var team: Team
    """The threads."""

    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        """Takes all rows through a program without columns.

        Parameters:
            P: The row program.
            dtype: The type of inputs and outputs.
            ftype: The type of the features.

        Args:
            operands: The tensors.

        Raises:
            If the launch fails.
        """
        run_rows[P, dtype, ftype](self.team, operands)

    def add_up[
        accum: DType, dtype: DType
    ](self, terms: Int64, count: Int, output: Int64, accumulate: Bool) raises:
        """Sums a vector in a fixed order.

        Parameters:
            accum: The type of the terms.
            dtype: The type of the sum.

        Args:
            terms: Address of the vector.
            count: The number of its elements.
            output: Address of the sum.
            accumulate: Whether to add to what is there.

        Raises:
            If the launch fails.
        """
        add_up[accum, dtype](terms, count, output, accumulate)


@fieldwise_init
struct _Job[accum: DType](Copyable, Movable):
    """The arguments of all parts."""

    var operands: Operands[Self.accum]
    var part_rows: Int
    var parts: Int
    var sums: Addresses


def run_rows[
    P: RowProgram, dtype: DType, ftype: DType
](team: Team, operands: Operands[accumulator[dtype]()]):
    """Takes all rows through a program without columns.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.

    Args:
        team: The threads to share the rows.
        operands: The tensors.
    """
    comptime assert P.columns == 0, "sums over rows need run_rows_and_columns"
    var job = _job[P, dtype](operands)
    team.run(_part[P, dtype, ftype], job.parts, job)


def _job[
    P: RowProgram, dtype: DType
](operands: Operands[accumulator[dtype]()]) -> _Job[accumulator[dtype]()]:
    """Divides the rows into parts, not depending on the number of threads."""
    var rows = Int(operands.rows)
    var length = Int(operands.length)
    if rows == 0 or length == 0:
        return {operands, 1, 0, Addresses(fill=0)}
    var part_rows = max(
        ceildiv(_PART_ELEMENTS, length), ceildiv(rows, _MAX_PARTS)
    )
    if not operands.accumulate:
        comptime for k in range(P.outputs):
            if operands.outputs[k] != 0:
                prefer_large_pages(
                    Int(operands.outputs[k]), rows * length * size_of[dtype]()
                )
    return {
        operands,
        part_rows,
        ceildiv(rows, part_rows),
        Addresses(fill=0),
    }


def column_sums_bytes[
    P: RowProgram, dtype: DType
](rows: Int, length: Int) -> Int:
    """Returns the size of the workspace for a program's sums over rows.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.

    Args:
        rows: The number of rows M.
        length: The number of elements K of a row.

    Returns:
        The number of bytes.
    """
    var operands = Operands[accumulator[dtype]()](rows, length)
    var parts = _job[P, dtype](operands).parts
    return P.columns * parts * length * size_of[accumulator[dtype]()]()


def run_rows_and_columns[
    P: RowProgram, dtype: DType, ftype: DType
](team: Team, operands: Operands[accumulator[dtype]()], sums: Addresses):
    """Takes all rows through a program with columns, then adds the partial sums of its parts.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.
        ftype: The type of the features and of the sums.

    Args:
        team: The threads to share the rows.
        operands: The tensors; `column_sums` points to `column_sums_bytes` bytes.
        sums: Vectors [K] to write; 0 where not wanted.
    """
    var job = _job[P, dtype](operands)
    job.sums = sums
    team.run(_part[P, dtype, ftype], job.parts, job)
    team.run(
        _finish_columns[P, dtype, ftype],
        ceildiv(Int(operands.length), _FINISH_COLUMNS),
        job,
    )


def _finish_columns[
    P: RowProgram, dtype: DType, ftype: DType
](data: Data, part: Int):
    """Adds the partial sums of some columns in the order of the rows."""
    comptime accum = accumulator[dtype]()
    ref job = data.unsafe_bitcast[_Job[accum]]()[]
    var length = Int(job.operands.length)
    var first = part * _FINISH_COLUMNS
    comptime for c in range(P.columns):
        if job.sums[c] != 0:
            var partial = _pointer[accum](
                job.operands.column_sums
            ).unsafe_offset(c * job.parts * length)
            for column in range(first, min(first + _FINISH_COLUMNS, length)):
                var sum = Scalar[accum](0)
                for i in range(job.parts):
                    sum += partial.unsafe_offset(
                        i * length + column
                    ).unsafe_load()
                _pointer[ftype](job.sums[c]).unsafe_offset(column).unsafe_store(
                    sum.cast[ftype]()
                )


def add_up[
    accum: DType, dtype: DType
](terms: Int64, count: Int, output: Int64, accumulate: Bool):
    """Sums a vector in a fixed order, in float64: it may be long.

    Parameters:
        accum: The type of the terms.
        dtype: The type of the sum.

    Args:
        terms: Address of the vector.
        count: The number of its elements.
        output: Address of the sum.
        accumulate: Whether to add to what is there.
    """
    var sum = Float64(0)
    for i in range(count):
        var term = _pointer[accum](terms).unsafe_offset(i).unsafe_load()
        sum += term.cast[DType.float64]()
    var place = _pointer[dtype](output)
    if accumulate:
        sum += place.unsafe_load().cast[DType.float64]()
    place.unsafe_store(sum.cast[dtype]())


def _part[P: RowProgram, dtype: DType, ftype: DType](data: Data, part: Int):
    """Computes the rows of a part."""
    comptime accum = accumulator[dtype]()
    ref job = data.unsafe_bitcast[_Job[accum]]()[]
    var operands = job.operands
    var length = Int(operands.length)
    var first = part * job.part_rows
    comptime for c in range(P.columns):
        var sums = _pointer[accum](operands.column_sums).unsafe_offset(
            (c * job.parts + part) * length
        )
        for i in range(length):
            sums.unsafe_offset(i).unsafe_store(Scalar[accum](0))
    for index in range(first, min(first + job.part_rows, Int(operands.rows))):
        _take_row[P, dtype, ftype](operands, index, job.parts, part)


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
        var sums = _identities[P, accum, 1]()
        var column = 0
        while column + step <= length:
            var blocks = StaticTuple[Terms[accum, width], _UNROLL](
                fill=_identities[P, accum, width]()
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
                    blocks[u] = _combine[P, p](blocks[u], terms)
                column += step
            var block = _combine[P, p](
                _combine[P, p](blocks[0], blocks[1]),
                _combine[P, p](blocks[2], blocks[3]),
            )
            sums = _combine[P, p](sums, _across[P, p](block))
        while column + width <= length:
            var terms = _take[P, dtype, ftype, p, width](
                operands, row, index, column, totals, parts, part
            )
            sums = _combine[P, p](sums, _across[P, p](terms))
            column += width
        while column < length:
            var terms = _take[P, dtype, ftype, p, 1](
                operands, row, index, column, totals, parts, part
            )
            sums = _combine[P, p](sums, terms)
            column += 1
        comptime for s in range(P.stages):
            comptime if P.pass_of(s) == p:
                totals[s] = P.finish[s](row, sums[s], totals[max(s - 1, 0)])
    comptime for s in range(P.stages):
        comptime for r in range(P.results_of[s]()):
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
def _identities[
    P: RowProgram, dtype: DType, width: Int
]() -> Terms[dtype, width]:
    """Returns the terms of no elements."""
    var sums = Terms[dtype, width](fill={})
    comptime for s in range(P.stages):
        comptime redo = P.redo_of[s]()
        var none = materialize[redo]().identity[dtype, width]()
        sums[s] = {none, none, none, none}
    return sums


@always_inline
def _combine[
    dtype: DType, width: Int, //, P: RowProgram, pass_index: Int
](a: Terms[dtype, width], b: Terms[dtype, width]) -> Terms[dtype, width]:
    """Reduces the terms of two groups of elements."""
    var sums = a
    comptime for s in range(P.stages):
        comptime if P.pass_of(s) == pass_index:
            comptime redo = P.redo_of[s]()
            var sum = a[s]
            comptime for t in range(P.terms_of[s]()):
                sum[t] = materialize[redo]().combine[dtype, width](
                    sum[t], b[s][t]
                )
            sums[s] = sum
    return sums


@always_inline
def _across[
    dtype: DType, width: Int, //, P: RowProgram, pass_index: Int
](terms: Terms[dtype, width]) -> Terms[dtype, 1]:
    """Reduces the terms of neighbouring elements."""
    var sums = Terms[dtype, 1](fill={})
    comptime for s in range(P.stages):
        comptime if P.pass_of(s) == pass_index:
            comptime redo = P.redo_of[s]()
            var sum = Values[dtype, 1]()
            comptime for t in range(P.terms_of[s]()):
                sum[t] = materialize[redo]().across(terms[s][t])
            sums[s] = sum
    return sums
