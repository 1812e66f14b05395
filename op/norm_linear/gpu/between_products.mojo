"""Launches what a backward needs between its matrix products.

    dz = dy W;  dx, dgamma, dbeta from dz and x;  z = norm(x) again;  dbias = sum over rows dy;  dW = dy^T z

That is one pass over dz and x, one over dy, and one launch that adds up the partial sums of both, in a fixed
order and without atomics.
"""

from ...call import Call
from ...device import Gpu
from ...rows.columns import Totals
from ...rows.launch import launch_rows
from ...rows.launch_columns import (
    ColumnSum,
    column_sums_bytes,
    launch_columns,
    launch_rows_and_columns,
    launch_totals,
)
from ...rows.operands import Addresses, Operands, accumulator
from ...rows.programs.layer_norm import LayerNormBackward
from ...rows.values import SAME
from .normalize import launch_normalize


def between_products_bytes[
    dtype: DType, narrow: DType = SAME
](gpu: Gpu, call: Call) -> Int:
    """Returns the size of the workspace of `launch_between_products`.

    Parameters:
        dtype: The type of x.
        narrow: The type of z, dy and dbias, if it is another; else `SAME`.

    Args:
        gpu: Where to run.
        call: Sizes, and which of dgamma, dbeta and dbias are wanted.

    Returns:
        The number of bytes.
    """
    comptime product_dtype = dtype if narrow == SAME else narrow
    return _norm_bytes[dtype, narrow](gpu, call) + (
        column_sums_bytes[ColumnSum, product_dtype](
            gpu, call.M, call.N
        ) if call.dbias
        != 0 else 0
    )


def _norm_bytes[dtype: DType, narrow: DType](gpu: Gpu, call: Call) -> Int:
    """Returns the part of dgamma and dbeta, which comes first."""
    if call.dgamma == 0 and call.dbeta == 0:
        return 0
    return column_sums_bytes[LayerNormBackward[narrow], dtype](
        gpu, call.M, call.K
    )


def row_operands[accum: DType](call: Call) -> Operands[accum]:
    """Names the tensors for the pass over dz and x.

    Parameters:
        accum: The type computed in.

    Args:
        call: The tensors.

    Returns:
        The operands of `LayerNormBackward`.
    """
    var rows = Operands[accum](call.M, call.K)
    rows.inputs[0] = Int64(call.dz)
    rows.inputs[1] = Int64(call.x)
    rows.features[0] = Int64(call.gamma)
    rows.features[1] = Int64(call.beta)
    rows.absent[0] = 1
    rows.saved[0] = Int64(call.mean)
    rows.saved[1] = Int64(call.rstd)
    rows.outputs[0] = Int64(call.dx)
    rows.outputs[1] = Int64(call.z)
    return rows


def launch_between_products[
    dtype: DType, norm_dtype: DType, narrow: DType = SAME
](gpu: Gpu, call: Call) raises:
    """Writes which of dx, z, dgamma, dbeta and dbias are wanted; z may take the place of dz, if of its type.

    Parameters:
        dtype: The type of x and dz.
        norm_dtype: The type of the norm's parameters.
        narrow: The type of z, dy and dbias, if it is another; else `SAME`.

    Args:
        gpu: Where to run.
        call: The tensors; dz is not needed for z and dbias alone.

    Raises:
        If a launch fails.
    """
    comptime product_dtype = dtype if narrow == SAME else narrow
    var totals = Totals()
    if call.dgamma != 0 or call.dbeta != 0:
        var rows = row_operands[accumulator[dtype]()](call)
        rows.column_sums = Int64(call.workspace)
        var sums = Addresses(fill=0)
        sums[0] = Int64(call.dgamma)
        sums[1] = Int64(call.dbeta)
        launch_rows_and_columns[
            LayerNormBackward[narrow],
            LayerNormBackward[narrow, columns=0],
            dtype,
            norm_dtype,
        ](gpu, rows, sums, totals)
    elif call.dx != 0:
        launch_rows[LayerNormBackward[narrow, columns=0], dtype, norm_dtype](
            gpu, row_operands[accumulator[dtype]()](call)
        )
    elif call.z != 0:
        var alone = call
        alone.mean = 0
        alone.rstd = 0
        launch_normalize[dtype, norm_dtype, narrow](gpu, alone)

    if call.dbias != 0:
        var outputs = Operands[accumulator[product_dtype]()](call.M, call.N)
        outputs.inputs[0] = Int64(call.dy)
        outputs.column_sums = Int64(
            call.workspace + _norm_bytes[dtype, narrow](gpu, call)
        )
        var sums = Addresses(fill=0)
        sums[0] = Int64(call.dbias)
        launch_columns[ColumnSum, product_dtype, product_dtype](
            gpu, outputs, sums, totals
        )
    launch_totals[product_dtype](gpu, totals)
