"""What all forwards share: the normalized rows, and the workspace of a worker."""

from std.sys import size_of

from ...call import Call
from ...gemm.cpu.blocking import Blocking
from ...gemm.cpu.memory import Arena, Matrix
from ...gemm.cpu.pack import pack_rows
from ...norms.norm import Norm
from .activate import Half
from .forward_plan import ForwardPlan
from .job import Job
from .normalize import NormalizeRows, normalized_rows
from .parameters import in_type_of_sums

comptime Forward[dtype: DType] = Job[dtype, ForwardPlan[dtype]]
"""A forward and its plan.

Parameters:
    dtype: Element type of the tensors.
"""


def normalize_into[
    dtype: DType, ThisNorm: Norm
](
    job: Forward[dtype],
    target: Matrix[Blocking[dtype].operand],
    first: Int,
    count: Int,
):
    """Normalizes rows of x, or of the sum that they make, and stores their statistics.

    Parameters:
        dtype: Element type of the tensors.
        ThisNorm: The norm.

    Args:
        job: The call.
        target: Where the rows go, as rows of a left operand.
        first: The first row.
        count: Number of rows.
    """
    if job.call[].groups == 0:
        _normalize_as[dtype, ThisNorm, False](job, target, first, count)
    else:
        _normalize_as[dtype, ThisNorm, True](job, target, first, count)


def _normalize_as[
    dtype: DType, ThisNorm: Norm, is_modulated: Bool
](
    job: Forward[dtype],
    target: Matrix[Blocking[dtype].operand],
    first: Int,
    count: Int,
):
    ref call = job.call[]
    pack_rows[dtype](
        target,
        Matrix[dtype](normalized_rows(call), call.K),
        first,
        count,
        call.K,
        NormalizeRows[
            dtype,
            ThisNorm,
            is_saved=False,
            is_affine=True,
            is_modulated=is_modulated,
        ](job.call, job.gamma, job.beta),
    )


struct Room[dtype: DType](TrivialRegisterPassable):
    """A worker's room for some columns of the product: bias and sums of each half.

    Parameters:
        dtype: Element type of the tensors.
    """

    comptime B = Blocking[Self.dtype]
    """Block sizes and number formats."""

    var bias: Int
    """Address of room for the bias of a half."""
    var sums: Matrix[Self.B.accum]
    """The sums of the first half."""
    var rows: Int
    """Rows of sums from a half to the next."""
    var width: Int
    """Most columns."""

    def __init__(out self, mut arena: Arena, plan: ForwardPlan[Self.dtype]):
        """Reserves the arrays.

        Args:
            arena: Where from.
            plan: How many columns and rows they have.
        """
        comptime B = Self.B
        self.bias = arena.take[B.accum](plan.rooms * plan.width)
        self.sums = {
            arena.take[B.accum](plan.rooms * plan.sum_rows * plan.sum_stride),
            plan.sum_stride,
        }
        self.rows = plan.sum_rows
        self.width = plan.width

    def half(
        self, call: Call, half: Int, column: Int, columns: Int, place: Int
    ) -> Half[Self.dtype]:
        """Prepares a half's bias.

        Args:
            call: The tensors.
            half: 0, or 1 for what a gate multiplies.
            column: The first column.
            columns: Number of columns.
            place: Which of the rooms it takes.

        Returns:
            The half.
        """
        comptime B = Self.B
        var first = half * call.N + column
        return {
            self.sums_of(place),
            in_type_of_sums[Self.dtype](
                self.bias_of(place),
                call.bias + first * size_of[Self.dtype]() if call.bias
                != 0 else 0,
                columns,
                default=0,
                is_float32=False,
                padded=True,
            ),
        }

    def sums_of(self, place: Int) -> Matrix[Self.B.accum]:
        """Finds the sums of a room.

        Args:
            place: Which of the rooms.

        Returns:
            The sums.
        """
        return self.sums.part(place * self.rows, 0)

    def bias_of(self, place: Int) -> Int:
        """Finds the bias of a room.

        Args:
            place: Which of the rooms.

        Returns:
            Its address.
        """
        return self.bias + place * self.width * size_of[Self.B.accum]()
