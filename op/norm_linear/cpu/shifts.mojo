"""Computes the rounding error of each row's saved mean, where it matters in a sum over rows."""

from ...norms.norm import Norm
from ...team import Data, Team
from .backward_plan import BackwardPlan
from .job import Job
from .statistics import Statistics

comptime _Job[dtype: DType] = Job[dtype, BackwardPlan[dtype]]


def find_shifts[dtype: DType, ThisNorm: Norm](mut job: _Job[dtype], team: Team):
    """Finds the shifts of all rows, if some are so far from zero that they need one.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        job: The call. Its shifts are written.
        team: The threads to use.
    """
    for row in range(job.call[].M):
        if Statistics[dtype, ThisNorm].is_far(job.call, row):
            team.run(_find_part[dtype, ThisNorm], _parts(job), job)
            job.shifts = job.workspace + job.plan.shifts
            return


def _parts[dtype: DType](job: _Job[dtype]) -> Int:
    return min(job.plan.workers, job.call[].M)


def _find_part[dtype: DType, ThisNorm: Norm](data: Data, index: Int):
    """Finds the shifts of a part of the rows; those of the others change nothing."""
    ref job = data.unsafe_bitcast[_Job[dtype]]()[]
    comptime Row = Statistics[dtype, ThisNorm]
    var M = job.call[].M
    var shifts = job.at[Row.B.accum](job.plan.shifts)
    for row in range(index * M // _parts(job), (index + 1) * M // _parts(job)):
        var shift = Scalar[Row.B.accum](-0.0)
        if Row.is_far(job.call, row):
            shift = Row.shift_of(job.call, row)
        shifts.unsafe_offset(row).unsafe_store(shift)
