"""Launches the norm itself: z, mean and rstd from x."""

from ...call import Call
from ...device import Gpu
from ...rows.launch import launch_rows
from ...rows.operands import Operands, accumulator
from ...rows.programs.layer_norm import LayerNormForward
from ...rows.values import SAME


def launch_normalize[
    dtype: DType, norm_dtype: DType, narrow: DType = SAME
](gpu: Gpu, call: Call) raises:
    """Writes z, and mean and rstd where they are wanted.

    Parameters:
        dtype: The type of x.
        norm_dtype: The type of the norm's parameters.
        narrow: The type of z, if it is not that of x; else `SAME`.

    Args:
        gpu: Where to run.
        call: The tensors.

    Raises:
        If the launch fails.
    """
    var rows = Operands[accumulator[dtype]()](call.M, call.K)
    rows.inputs[0] = Int64(call.x)
    rows.features[0] = Int64(call.gamma)
    rows.features[1] = Int64(call.beta)
    rows.absent[0] = 1
    rows.outputs[0] = Int64(call.z)
    rows.results[0] = Int64(call.mean)
    rows.results[1] = Int64(call.rstd)
    rows.number = call.eps.cast[accumulator[dtype]()]()
    launch_rows[LayerNormForward[narrow], dtype, norm_dtype](gpu, rows)
