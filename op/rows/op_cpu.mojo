"""Runs an op on a CPU: its program, then the sum that is the gradient of its parameter."""

from ..team import Team
from .cpu import run_rows
from .cpu_row import _pointer
from .op import RowCall, RowOp
from .operands import accumulator


def run_op[Op: RowOp, dtype: DType](team: Team, call: RowCall):
    """Runs an op.

    Parameters:
        Op: The op.
        dtype: The type of its tensors.

    Args:
        team: The threads to share the rows.
        call: The tensors.
    """
    run_rows[Op.Rows, dtype, dtype](team, call.operands[Op, dtype]())
    comptime if Op.has_parameter_gradient:
        if call.parameter_gradient != 0:
            if call.parameter_is_float32 != 0:
                _add_up[accumulator[dtype](), DType.float32](call)
            else:
                _add_up[accumulator[dtype](), dtype](call)


def _add_up[accum: DType, dtype: DType](call: RowCall):
    """Sums the rows' shares of the parameter's gradient in order, in float64: they may be many."""
    var sum = Float64(0)
    for i in range(call.shares()):
        var share = _pointer[accum](call.workspace).unsafe_offset(i)
        sum += share.unsafe_load().cast[DType.float64]()
    var gradient = _pointer[dtype](call.parameter_gradient)
    if call.accumulate != 0:
        sum += gradient.unsafe_load().cast[DType.float64]()
    gradient.unsafe_store(sum.cast[dtype]())
