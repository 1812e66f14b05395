"""Runs the parts of a pass on a CPU's threads."""

from std.math import ceildiv

from ..call import Call
from ..rows.cpu import column_sums_bytes, run_rows, run_rows_and_columns
from ..rows.operands import Operands, Sums, accumulator
from ..rows.program import RowProgram
from ..team import Data, Team
from .modulation import Modulation
from .runner import Runner

comptime _PART_ELEMENTS = 1 << 12


@fieldwise_init
struct CpuRunner(Runner):
    """Runs everything at once, sums included."""

    var team: Team
    """The threads."""

    @doc_hidden
    @staticmethod
    def of(call: Call) -> Self:
        return Self(Team(call.context, call.threads))

    @doc_hidden
    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        run_rows[P, dtype, ftype](self.team, operands)

    @doc_hidden
    def run_with_sums[
        P: RowProgram, without_columns: RowProgram, dtype: DType, ftype: DType
    ](mut self, operands: Operands[accumulator[dtype]()], sums: Sums) raises:
        if sums.any():
            run_rows_and_columns[P, dtype, ftype](self.team, operands, sums)
        else:
            run_rows[without_columns, dtype, ftype](self.team, operands)

    @doc_hidden
    def sums_bytes[
        P: RowProgram, dtype: DType
    ](self, rows: Int, length: Int, groups: Int = 1) -> Int:
        return column_sums_bytes[P, dtype](rows, length, groups)

    @doc_hidden
    def modulate[accum: DType](self, modulation: Modulation[accum]) raises:
        var job = modulation
        var parts = ceildiv(Int(job.length), _PART_ELEMENTS)
        self.team.run(_modulate[accum], parts * Int(job.groups), job)

    @doc_hidden
    def finish(mut self) raises:
        pass


def _modulate[accum: DType](data: Data, part: Int):
    """Runs a modulation at some elements of one group."""
    ref job = data.unsafe_bitcast[Modulation[accum]]()[]
    var groups = Int(job.groups)
    var first = part // groups * _PART_ELEMENTS
    for column in range(first, min(first + _PART_ELEMENTS, Int(job.length))):
        job.at(part % groups, column)
