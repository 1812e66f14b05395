"""Runs a row program on a CPU: SIMD along the row, rows shared among PyTorch's threads.

A row is read again in each pass: it is in the cache, and running the stages costs less than storing what they return.
"""

from std.math import ceildiv
from std.sys import size_of

from op.pages import prefer_large_pages
from op.team import Data, Team

from .cpu_row import Place, _Pointer, _pointer, _take_row
from .operands import Addresses, Operands, Sums, accumulator
from .program import RowProgram
from .types import store_as

comptime _PART_ELEMENTS = 1 << 13
"""Elements that a thread takes at least."""
comptime _SUM_ELEMENTS = 1 << 15
"""The same where each part has its own sums, which have to be cleared and added."""
comptime _MAX_PARTS = 64
comptime _FINISH_COLUMNS = 512
comptime _CHAIN_ROWS = 32
"""Rows that are added one after the other before their sum joins the total: rounding errors stay those of
short sums."""


@fieldwise_init
struct _Job[accum: DType](Copyable, Movable):
    """The arguments of all parts."""

    var operands: Operands[Self.accum]
    var part_rows: Int
    var parts: Int
    """Parts of a group."""
    var sums: Sums

    def all_parts(self) -> Int:
        """Returns the number of parts of all groups."""
        return self.parts * Int(self.operands.groups)


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
    team.run(_part[P, dtype, ftype], job.all_parts(), job)


def _job[
    P: RowProgram, dtype: DType
](operands: Operands[accumulator[dtype]()]) -> _Job[accumulator[dtype]()]:
    """Divides the rows of each group into parts, whatever the number of threads."""
    var rows = Int(operands.rows)
    var length = Int(operands.length)
    var no_sums = Sums(Addresses(fill=0), 0)
    if rows == 0 or length == 0:
        return {operands, 1, 0, no_sums}
    var all_rows = rows * Int(operands.groups)
    comptime elements = _PART_ELEMENTS if P.columns == 0 else _SUM_ELEMENTS
    var part_rows = max(
        ceildiv(elements, length), ceildiv(all_rows, _MAX_PARTS)
    )
    if not operands.accumulate:
        var bytes = all_rows * length * size_of[dtype]()
        comptime for k in range(P.outputs):
            comptime is_half = k >= P.first_half_output
            # the first half covers the second
            if operands.outputs[k] != 0 and k <= P.first_half_output:
                prefer_large_pages(
                    Int(operands.outputs[k]), bytes * (2 if is_half else 1)
                )
        if operands.sum != 0:
            prefer_large_pages(Int(operands.sum), bytes)
    return {operands, part_rows, ceildiv(rows, part_rows), no_sums}


def column_sums_bytes[
    P: RowProgram, dtype: DType
](rows: Int, length: Int, groups: Int = 1) -> Int:
    """Returns the size of the workspace for a program's sums over rows.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.

    Args:
        rows: The number of rows M.
        length: The number of elements K of a row.
        groups: The number of groups.

    Returns:
        The number of bytes.
    """
    var operands = Operands[accumulator[dtype]()](rows, length, groups)
    var parts = _job[P, dtype](operands).all_parts()
    return P.columns * parts * 2 * length * size_of[accumulator[dtype]()]()


def run_rows_and_columns[
    P: RowProgram, dtype: DType, ftype: DType
](team: Team, operands: Operands[accumulator[dtype]()], sums: Sums):
    """Takes all rows through a program with columns, then adds the partial sums of its parts.

    Parameters:
        P: The row program.
        dtype: The type of inputs and outputs.
        ftype: The type of the features.

    Args:
        team: The threads to share the rows.
        operands: The tensors; `column_sums` points to `column_sums_bytes` bytes.
        sums: What to write.
    """
    var job = _job[P, dtype](operands)
    job.sums = sums
    team.run(_part[P, dtype, ftype], job.all_parts(), job)
    team.run(
        _finish_columns[P.columns, accumulator[dtype]()],
        ceildiv(Int(operands.length), _FINISH_COLUMNS) * Int(operands.groups),
        job,
    )


def _finish_columns[columns: Int, accum: DType](data: Data, part: Int):
    """Adds the partial sums of some columns of a group in the order of the rows."""
    ref job = data.unsafe_bitcast[_Job[accum]]()[]
    var length = Int(job.operands.length)
    var groups = Int(job.operands.groups)
    var group = part % groups
    var first = part // groups * _FINISH_COLUMNS
    for c in range(columns):
        var output = job.sums.outputs[c]
        if output == 0:
            continue
        var totals = _totals(
            job.operands, c, job.all_parts(), group * job.parts
        )
        for column in range(first, min(first + _FINISH_COLUMNS, length)):
            var sum = Float64(0)
            for i in range(job.parts):
                sum += (
                    totals.unsafe_offset(2 * i * length + column)
                    .unsafe_load()
                    .cast[DType.float64]()
                )
            var place = group * length + column
            store_as(job.sums.type, output, place, sum.cast[accum]())


def _totals[
    accum: DType
](operands: Operands[accum], column: Int, parts: Int, part: Int) -> _Pointer[
    accum
]:
    """Locates a part's sums of a column program; those of its last rows are just before them."""
    return _pointer[accum](operands.column_sums).unsafe_offset(
        (2 * (column * parts + part) + 1) * Int(operands.length)
    )


def _part[P: RowProgram, dtype: DType, ftype: DType](data: Data, part: Int):
    """Computes the rows of a part."""
    comptime accum = accumulator[dtype]()
    ref job = data.unsafe_bitcast[_Job[accum]]()[]
    var operands = job.operands
    var length = Int(operands.length)
    var rows = Int(operands.rows)
    comptime for c in range(P.columns):
        var sums = _totals(operands, c, job.all_parts(), part)
        for i in range(-length, length):
            sums.unsafe_offset(i).unsafe_store(Scalar[accum](0))
    var group = part // job.parts
    var first = part % job.parts * job.part_rows
    var last = min(first + job.part_rows, rows)
    var place = Place(0, group, 2 * job.all_parts(), 2 * part)
    for row in range(first, last):
        place.row = group * rows + row
        _take_row[P, dtype, ftype](operands, place)
        comptime if P.columns > 0:
            if (row - first + 1) % _CHAIN_ROWS == 0 or row + 1 == last:
                comptime for c in range(P.columns):
                    var sums = _totals(operands, c, job.all_parts(), part)
                    for i in range(length):
                        var chain = sums.unsafe_offset(i - length)
                        sums.unsafe_offset(i).unsafe_store(
                            sums.unsafe_offset(i).unsafe_load()
                            + chain.unsafe_load()
                        )
                        chain.unsafe_store(Scalar[accum](0))
