"""Computes a forward of so few rows that nothing of the weight is copied: reading it is what takes time.

The normalized rows are shared, and a task takes some columns of y, rows of the weight.
"""

from std.math import ceildiv

from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.few_rows import FewRows, multiply_few_rows
from ...gemm.cpu.memory import Arena, Matrix
from ...norms.norm import Norm
from ...team import Data, Team
from .activate import finish_columns
from .forward_job import Forward, Room, normalize_into


def run_in_place[
    dtype: DType, ThisNorm: Norm
](mut job: Forward[dtype], team: Team):
    """Computes a forward.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        job: The call.
        team: The threads to use.
    """
    team.run(_normalize_part[dtype, ThisNorm], job.call[].M, job)
    # Of a single task no team is made.
    var tasks = ceildiv(job.call[].N, job.plan.task_columns)
    team.run(_columns_part[dtype], min(job.plan.workers, tasks), job)


def _rows[dtype: DType](job: Forward[dtype]) -> Matrix[FewRows[dtype].left]:
    """Finds the rows as they are multiplied."""
    comptime left = FewRows[dtype].left
    return {
        job.at[left](job.plan.left),
        Blocking[dtype].row_stride(job.call[].K),
    }


def _normalize_part[dtype: DType, ThisNorm: Norm](data: Data, index: Int):
    """Normalizes a row, which is rounded to the type of operands."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    var K = job.call[].K
    var row = Matrix[B.operand](
        job.at[B.operand](job.plan.shared), B.row_stride(K)
    ).part(index, 0)
    normalize_into[dtype, ThisNorm](job, row, index, 1)
    comptime if B.operand != FewRows[dtype].left:
        comptime unit = FewRows[dtype].unit
        var wide = _rows(job).at(index)
        for k in range(0, K, unit):
            wide.unsafe_offset(k).unsafe_store(
                row.at(0, k)
                .unsafe_load[width=unit]()
                .cast[FewRows[dtype].left]()
            )


def _columns_part[dtype: DType](data: Data, worker: Int):
    """Takes columns until none are left."""
    ref job = data.unsafe_bitcast[Forward[dtype]]()[]
    comptime B = Blocking[dtype]
    ref call = job.call[]
    ref plan = job.plan
    var arena = Arena(job.workspace + plan.own + worker * plan.own_bytes)
    var room = Room[dtype](arena, plan)
    var weight = Matrix[dtype](call.weight, call.K)
    comptime ahead = FewRows[dtype].takes_ahead
    var task = worker if ahead else job.take()
    var begin = task * plan.task_columns
    var is_first = True
    while begin < call.N:
        var end = min(call.N, begin + plan.task_columns)
        var after = end
        for first in range(begin, end, B.tile_n):
            var columns = min(B.tile_n, end - first)
            after = first + columns
            comptime if ahead:
                # No earlier, so that threads end at the same time.
                if after == end:
                    task = plan.workers + job.take()
                    after = task * plan.task_columns
            for which in range(plan.halves):
                var row = which * call.N + first
                var next = columns if first + columns < end else 0
                comptime if ahead:
                    if which + 1 < plan.halves:
                        next = call.N
                    else:
                        next = after - row if after < call.N else 0
                multiply_few_rows[dtype](
                    room.sums_of(which),
                    _rows(job),
                    weight.part(row, 0),
                    call.M,
                    columns,
                    call.K,
                    is_first if ahead else first == begin,
                    next,
                )
                is_first = False
            var half = room.half(call, 0, first, columns, 0)
            var other = half
            if plan.halves > 1:
                other = room.half(call, 1, first, columns, 1)
            finish_columns(call, 0, first, call.M, columns, half, other)
        begin = after
        comptime if not ahead:
            begin = job.take() * plan.task_columns
