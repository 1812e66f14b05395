"""Runs a row program on a CPU: SIMD along the row, rows shared among PyTorch's threads.

A row is read again in each pass: it is in the cache, and the stages cost less than storing what they return.
"""

from std.math import ceildiv
from std.sys import size_of

from op.pages import prefer_large_pages
from op.team import Data, Team

from .cpu_row import _pointer, _take_row
from .operands import Addresses, Operands, accumulator
from .program import RowProgram

comptime _PART_ELEMENTS = 1 << 15
comptime _MAX_PARTS = 64
comptime _FINISH_COLUMNS = 512


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
