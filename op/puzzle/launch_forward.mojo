"""Launches the puzzle's forward with the documents' geometry.

Pointers in, shapes as parameters: the MAX registration and the kernel tests both
come in here.
"""

from layout.tile_layout import row_major
from layout.tile_tensor import TileTensor
from max.gpu.host import DeviceBuffer, DeviceContext
from std.math import ceildiv

from .addresses import Input, Output
from .fused import minimal_fused_cpu, minimal_fused_kernel
from .layernorm import layernorm_kernel
from .linear import (
    MATMUL_BLOCK_DIM_XY,
    add_bias_kernel,
    matmul_idiomatic_tiled,
)
from .transpose import TRANSPOSE_BLOCK_DIM_XY, transpose_kernel
from .unfused_cpu import unfused_cpu


def launch_forward[
    target: StaticString,
    algorithm: StaticString,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    output_dim: Int,
    dtype: DType = DType.float32,
](
    output: Output[dtype],
    input: Input[dtype],
    ln_weight: Input[dtype],
    ln_bias: Input[dtype],
    linear_weight: Input[dtype],
    linear_bias: Input[dtype],
    ctx: DeviceContext,
) raises:
    """Computes LayerNorm and Linear on the device of the pointers.

    Parameters:
        target: `"cpu"` or `"gpu"`.
        algorithm: `"fused"` or `"unfused"`.
        batch_size: Number of sequences.
        seq_len: Positions in a sequence.
        hidden_dim: Elements of a position of `input`.
        output_dim: Elements of a position of `output`.
        dtype: Element type.

    Args:
        output: Results, `[batch_size, seq_len, output_dim]`.
        input: Rows, `[batch_size, seq_len, hidden_dim]`.
        ln_weight: Scale of each normalized element, `[hidden_dim]`.
        ln_bias: Shift of each normalized element, `[hidden_dim]`.
        linear_weight: Matrix, `[output_dim, hidden_dim]`.
        linear_bias: Added to each output, `[output_dim]`.
        ctx: The device.

    Raises:
        If the launch fails.
    """
    comptime assert algorithm in (
        StaticString("fused"),
        StaticString("unfused"),
    ), "algorithm must be 'fused' or 'unfused'"
    comptime input_layout = row_major[batch_size, seq_len, hidden_dim]()
    comptime ln_params_layout = row_major[hidden_dim]()
    comptime weight_layout = row_major[output_dim, hidden_dim]()
    comptime bias_layout = row_major[output_dim]()
    comptime output_layout = row_major[batch_size, seq_len, output_dim]()
    var output_tensor = TileTensor(output, output_layout)
    var input_tensor = TileTensor(input, input_layout)
    var ln_weight_tensor = TileTensor(ln_weight, ln_params_layout)
    var ln_bias_tensor = TileTensor(ln_bias, ln_params_layout)
    var linear_weight_tensor = TileTensor(linear_weight, weight_layout)
    var linear_bias_tensor = TileTensor(linear_bias, bias_layout)

    comptime if target == "cpu" and algorithm == "unfused":
        unfused_cpu[batch_size * seq_len, hidden_dim, output_dim](
            output, input, ln_weight, ln_bias, linear_weight, linear_bias
        )
    elif target == "cpu":
        minimal_fused_cpu[
            type_of(input_layout),
            type_of(ln_params_layout),
            type_of(weight_layout),
            type_of(bias_layout),
            type_of(output_layout),
            batch_size,
            seq_len,
            hidden_dim,
            output_dim,
            dtype,
        ](
            output_tensor,
            input_tensor,
            ln_weight_tensor,
            ln_bias_tensor,
            linear_weight_tensor,
            linear_bias_tensor,
        )
    elif target == "gpu" and algorithm == "fused":
        comptime fused = minimal_fused_kernel[
            type_of(input_layout),
            type_of(ln_params_layout),
            type_of(weight_layout),
            type_of(bias_layout),
            type_of(output_layout),
            batch_size,
            seq_len,
            hidden_dim,
            output_dim,
            dtype,
        ]
        ctx.enqueue_function[fused](
            output_tensor,
            input_tensor,
            ln_weight_tensor,
            ln_bias_tensor,
            linear_weight_tensor,
            linear_bias_tensor,
            grid_dim=(batch_size, seq_len),
            block_dim=1,
        )
    elif target == "gpu":
        comptime rows = batch_size * seq_len
        comptime normalized_layout = row_major[rows, hidden_dim]()
        comptime transposed_layout = row_major[hidden_dim, output_dim]()
        comptime product_layout = row_major[rows, output_dim]()
        var normalized = ctx.enqueue_create_buffer[dtype](rows * hidden_dim)
        var transposed = ctx.enqueue_create_buffer[dtype](
            hidden_dim * output_dim
        )
        var product = ctx.enqueue_create_buffer[dtype](rows * output_dim)

        comptime layernorm = layernorm_kernel[
            type_of(input_layout),
            type_of(ln_params_layout),
            type_of(input_layout),
            batch_size,
            seq_len,
            hidden_dim,
            dtype,
        ]
        ctx.enqueue_function[layernorm](
            TileTensor(_output(normalized), input_layout),
            input_tensor,
            ln_weight_tensor,
            ln_bias_tensor,
            grid_dim=(batch_size, seq_len),
            block_dim=hidden_dim,
        )

        comptime transpose = transpose_kernel[
            type_of(weight_layout),
            type_of(transposed_layout),
            output_dim,
            hidden_dim,
            dtype,
        ]
        ctx.enqueue_function[transpose](
            TileTensor(_output(transposed), transposed_layout),
            linear_weight_tensor,
            grid_dim=(
                ceildiv(hidden_dim, TRANSPOSE_BLOCK_DIM_XY),
                ceildiv(output_dim, TRANSPOSE_BLOCK_DIM_XY),
            ),
            block_dim=(TRANSPOSE_BLOCK_DIM_XY, TRANSPOSE_BLOCK_DIM_XY),
        )

        comptime matmul = matmul_idiomatic_tiled[
            type_of(normalized_layout),
            type_of(transposed_layout),
            type_of(product_layout),
            rows,
            output_dim,
            hidden_dim,
            dtype,
        ]
        ctx.enqueue_function[matmul](
            TileTensor(_output(product), product_layout),
            TileTensor(_input(normalized), normalized_layout),
            TileTensor(_input(transposed), transposed_layout),
            grid_dim=(
                ceildiv(output_dim, MATMUL_BLOCK_DIM_XY),
                ceildiv(rows, MATMUL_BLOCK_DIM_XY),
            ),
            block_dim=(MATMUL_BLOCK_DIM_XY, MATMUL_BLOCK_DIM_XY),
        )

        comptime add_bias = add_bias_kernel[
            type_of(output_layout),
            type_of(bias_layout),
            type_of(output_layout),
            batch_size,
            seq_len,
            output_dim,
            dtype,
        ]
        ctx.enqueue_function[add_bias](
            output_tensor,
            TileTensor(_input(product), output_layout),
            linear_bias_tensor,
            grid_dim=(batch_size, seq_len),
            block_dim=output_dim,
        )
        # The device frees each buffer after the work already on its stream.
        _ = normalized^
        _ = transposed^
        _ = product^
    else:
        raise Error("layernorm_linear: no kernel for target ", target)


def _output[dtype: DType, //](mut buffer: DeviceBuffer[dtype]) -> Output[dtype]:
    return buffer.unsafe_ptr().unsafe_origin_cast[MutAnyOrigin]()


def _input[dtype: DType, //](mut buffer: DeviceBuffer[dtype]) -> Input[dtype]:
    return _output(buffer).unsafe_mut_cast[False]()
