"""Names the ops that are row programs, for any device: which tensor is which operand.

Tensors are dense and given by address; 0 stands for what is not wanted. M rows have K elements. Where an op
takes `accumulate`, it adds to its outputs instead of overwriting them.
"""

from .composed import Div, DivBackward, Mean, Norm, NormBackward
from .layernorm import TrainableEpsLayerNorm, TrainableEpsLayerNormBackward
from .operands import Operands, RowTarget, accumulator


def trainable_eps_forward[
    T: RowTarget, //, dtype: DType
](
    target: T,
    y: Int64,
    x: Int64,
    o: Int64,
    M: Int,
    K: Int,
    o_is_float32: Bool,
) raises:
    """Computes y = v / sqrt(o o + mean(v v)) with v = x - mean(x).

    Parameters:
        T: The type of the device.
        dtype: The type of the tensors.

    Args:
        target: The device.
        y: The result [M, K].
        x: The input [M, K].
        o: The trainable scalar.
        M: The number of rows.
        K: The number of elements of a row.
        o_is_float32: Whether o is float32, whatever the dtype.

    Raises:
        If a launch fails.
    """
    var operands = Operands[accumulator[dtype]()](M, K)
    operands.inputs[0] = x
    operands.outputs[0] = y
    operands.parameter = o
    operands.parameter_is_float32 = o_is_float32
    target.run[TrainableEpsLayerNorm, dtype, dtype](operands)


def trainable_eps_backward[
    T: RowTarget, //, dtype: DType
](
    target: T,
    dx: Int64,
    do: Int64,
    dy: Int64,
    x: Int64,
    o: Int64,
    workspace: Int64,
    M: Int,
    K: Int,
    o_is_float32: Bool,
    accumulate: Bool,
) raises:
    """Computes the gradients of x and of o.

    Parameters:
        T: The type of the device.
        dtype: The type of the tensors.

    Args:
        target: The device.
        dx: The gradient of x [M, K].
        do: The gradient of o, of o's type.
        dy: The gradient of y [M, K].
        x: The input [M, K].
        o: The trainable scalar.
        workspace: M numbers of the type computed in; not needed without do.
        M: The number of rows.
        K: The number of elements of a row.
        o_is_float32: Whether o is float32, whatever the dtype.
        accumulate: Whether to add to the gradients.

    Raises:
        If a launch fails.
    """
    comptime accum = accumulator[dtype]()
    var operands = Operands[accum](M, K)
    operands.inputs[0] = dy
    operands.inputs[1] = x
    operands.outputs[0] = dx
    operands.accumulate = accumulate
    operands.parameter = o
    operands.parameter_is_float32 = o_is_float32
    if do != 0:
        operands.results[0] = workspace
    target.run[TrainableEpsLayerNormBackward, dtype, dtype](operands)
    if do != 0:
        # rows without elements have no share in it
        var count = M if K > 0 else 0
        if o_is_float32:
            target.add_up[accum, DType.float32](
                workspace, count, do, accumulate
            )
        else:
            target.add_up[accum, dtype](workspace, count, do, accumulate)


def mean[
    T: RowTarget, //, dtype: DType
](target: T, y: Int64, x: Int64, M: Int, K: Int, accumulate: Bool) raises:
    """Computes y = x - mean(x); with gradients for x and y, its own backward.

    Parameters:
        T: The type of the device.
        dtype: The type of the tensors.

    Args:
        target: The device.
        y: The result [M, K].
        x: The input [M, K].
        M: The number of rows.
        K: The number of elements of a row.
        accumulate: Whether to add to y.

    Raises:
        If a launch fails.
    """
    var operands = Operands[accumulator[dtype]()](M, K)
    operands.inputs[0] = x
    operands.outputs[0] = y
    operands.accumulate = accumulate
    target.run[Mean, dtype, dtype](operands)


def norm_forward[
    T: RowTarget, //, dtype: DType
](target: T, y: Int64, v: Int64, M: Int, K: Int) raises:
    """Computes y = sqrt(mean(v v)), for every element of the row.

    Parameters:
        T: The type of the device.
        dtype: The type of the tensors.

    Args:
        target: The device.
        y: The result [M, K].
        v: The input [M, K].
        M: The number of rows.
        K: The number of elements of a row.

    Raises:
        If a launch fails.
    """
    var operands = Operands[accumulator[dtype]()](M, K)
    operands.inputs[0] = v
    operands.outputs[0] = y
    target.run[Norm, dtype, dtype](operands)


def norm_backward[
    T: RowTarget, //, dtype: DType
](
    target: T,
    dv: Int64,
    dy: Int64,
    v: Int64,
    M: Int,
    K: Int,
    accumulate: Bool,
) raises:
    """Computes the gradient of v.

    Parameters:
        T: The type of the device.
        dtype: The type of the tensors.

    Args:
        target: The device.
        dv: The gradient of v [M, K].
        dy: The gradient of the norm [M, K].
        v: The input [M, K].
        M: The number of rows.
        K: The number of elements of a row.
        accumulate: Whether to add to dv.

    Raises:
        If a launch fails.
    """
    var operands = Operands[accumulator[dtype]()](M, K)
    operands.inputs[0] = dy
    operands.inputs[1] = v
    operands.outputs[0] = dv
    operands.accumulate = accumulate
    target.run[NormBackward, dtype, dtype](operands)


def div_forward[
    T: RowTarget, //, dtype: DType
](target: T, y: Int64, a: Int64, b: Int64, M: Int, K: Int) raises:
    """Computes y = a / b.

    Parameters:
        T: The type of the device.
        dtype: The type of the tensors.

    Args:
        target: The device.
        y: The result [M, K].
        a: The dividend [M, K].
        b: The divisor [M, K].
        M: The number of rows.
        K: The number of elements of a row.

    Raises:
        If a launch fails.
    """
    var operands = Operands[accumulator[dtype]()](M, K)
    operands.inputs[0] = a
    operands.inputs[1] = b
    operands.outputs[0] = y
    target.run[Div, dtype, dtype](operands)


def div_backward[
    T: RowTarget, //, dtype: DType
](
    target: T,
    da: Int64,
    db: Int64,
    dy: Int64,
    a: Int64,
    b: Int64,
    M: Int,
    K: Int,
    accumulate: Bool,
) raises:
    """Computes the gradients of a and b.

    Parameters:
        T: The type of the device.
        dtype: The type of the tensors.

    Args:
        target: The device.
        da: The gradient of a [M, K].
        db: The gradient of b [M, K].
        dy: The gradient of the quotient [M, K].
        a: The dividend [M, K].
        b: The divisor [M, K].
        M: The number of rows.
        K: The number of elements of a row.
        accumulate: Whether to add to the gradients.

    Raises:
        If a launch fails.
    """
    var operands = Operands[accumulator[dtype]()](M, K)
    operands.inputs[0] = dy
    operands.inputs[1] = a
    operands.inputs[2] = b
    operands.outputs[0] = da
    operands.outputs[1] = db
    operands.accumulate = accumulate
    target.run[DivBackward, dtype, dtype](operands)
