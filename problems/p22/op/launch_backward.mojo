"""Launches the puzzle's backward with the documents' geometry.

Pointers in, shapes as parameters: the MAX registration and the kernel tests both
come in here.
"""

from layout.tile_layout import row_major
from layout.tile_tensor import TileTensor
from max.gpu.host import DeviceBuffer, DeviceContext

from .addresses import Input, Output
from .fused_backward import (
    minimal_fused_cpu_backward,
    minimal_fused_kernel_backward,
)


def launch_backward[
    target: StaticString,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    output_dim: Int,
    dtype: DType = DType.float32,
](
    grad_input: Output[dtype],
    grad_ln_weight: Output[dtype],
    grad_ln_bias: Output[dtype],
    grad_weight: Output[dtype],
    grad_bias: Output[dtype],
    grad_output: Input[dtype],
    input: Input[dtype],
    ln_weight: Input[dtype],
    ln_bias: Input[dtype],
    linear_weight: Input[dtype],
    ctx: DeviceContext,
) raises:
    """Computes the five gradients on the device of the pointers.

    Parameters:
        target: `"cpu"` or `"gpu"`.
        batch_size: Number of sequences.
        seq_len: Positions in a sequence.
        hidden_dim: Elements of a position of `input`.
        output_dim: Elements of a position of `grad_output`.
        dtype: Element type.

    Args:
        grad_input: Gradient of `input`, `[batch_size, seq_len, hidden_dim]`.
        grad_ln_weight: Gradient of `ln_weight`, `[hidden_dim]`.
        grad_ln_bias: Gradient of `ln_bias`, `[hidden_dim]`.
        grad_weight: Gradient of `linear_weight`, `[output_dim, hidden_dim]`.
        grad_bias: Gradient of the linear bias, `[output_dim]`.
        grad_output: Incoming gradient, `[batch_size, seq_len, output_dim]`.
        input: Rows of the forward pass, `[batch_size, seq_len, hidden_dim]`.
        ln_weight: Scale of each normalized element, `[hidden_dim]`.
        ln_bias: Shift of each normalized element, `[hidden_dim]`.
        linear_weight: Matrix, `[output_dim, hidden_dim]`.
        ctx: The device.

    Raises:
        If the launch fails.
    """
    comptime input_layout = row_major[batch_size, seq_len, hidden_dim]()
    comptime ln_params_layout = row_major[hidden_dim]()
    comptime weight_layout = row_major[output_dim, hidden_dim]()
    comptime bias_layout = row_major[output_dim]()
    comptime output_layout = row_major[batch_size, seq_len, output_dim]()
    var grad_input_tensor = TileTensor(grad_input, input_layout)
    var grad_ln_weight_tensor = TileTensor(grad_ln_weight, ln_params_layout)
    var grad_ln_bias_tensor = TileTensor(grad_ln_bias, ln_params_layout)
    var grad_weight_tensor = TileTensor(grad_weight, weight_layout)
    var grad_bias_tensor = TileTensor(grad_bias, bias_layout)
    var grad_output_tensor = TileTensor(grad_output, output_layout)
    var input_tensor = TileTensor(input, input_layout)
    var ln_weight_tensor = TileTensor(ln_weight, ln_params_layout)
    var ln_bias_tensor = TileTensor(ln_bias, ln_params_layout)
    var linear_weight_tensor = TileTensor(linear_weight, weight_layout)

    # Positions add to the gradients of the parameters, so those are zero before
    # the first position starts. On a GPU the stream keeps that order.
    _zero[target](grad_ln_weight, hidden_dim, ctx)
    _zero[target](grad_ln_bias, hidden_dim, ctx)
    _zero[target](grad_weight, output_dim * hidden_dim, ctx)
    _zero[target](grad_bias, output_dim, ctx)

    comptime if target == "cpu":
        minimal_fused_cpu_backward[
            type_of(output_layout),
            type_of(input_layout),
            type_of(ln_params_layout),
            type_of(weight_layout),
            type_of(input_layout),
            type_of(ln_params_layout),
            type_of(ln_params_layout),
            type_of(weight_layout),
            type_of(bias_layout),
            batch_size,
            seq_len,
            hidden_dim,
            output_dim,
            dtype,
        ](
            grad_input_tensor,
            grad_ln_weight_tensor,
            grad_ln_bias_tensor,
            grad_weight_tensor,
            grad_bias_tensor,
            grad_output_tensor,
            input_tensor,
            ln_weight_tensor,
            ln_bias_tensor,
            linear_weight_tensor,
        )
    elif target == "gpu":
        comptime backward = minimal_fused_kernel_backward[
            type_of(output_layout),
            type_of(input_layout),
            type_of(ln_params_layout),
            type_of(weight_layout),
            type_of(input_layout),
            type_of(ln_params_layout),
            type_of(ln_params_layout),
            type_of(weight_layout),
            type_of(bias_layout),
            batch_size,
            seq_len,
            hidden_dim,
            output_dim,
            dtype,
        ]
        ctx.enqueue_function[backward](
            grad_input_tensor,
            grad_ln_weight_tensor,
            grad_ln_bias_tensor,
            grad_weight_tensor,
            grad_bias_tensor,
            grad_output_tensor,
            input_tensor,
            ln_weight_tensor,
            ln_bias_tensor,
            linear_weight_tensor,
            grid_dim=(batch_size, seq_len),
            block_dim=1,
        )
    else:
        raise Error("layernorm_linear_backward: no kernel for target ", target)


def _zero[
    dtype: DType, //, target: StaticString
](address: Output[dtype], count: Int, ctx: DeviceContext) raises:
    comptime if target == "gpu":
        ctx.enqueue_memset(
            DeviceBuffer[dtype](ctx, address, count, owning=False),
            Scalar[dtype](0),
        )
    else:
        for i in range(count):
            address.unsafe_offset(i).unsafe_store(Scalar[dtype](0))
