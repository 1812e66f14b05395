"""Computes LayerNorm and Linear in one kernel, one thread per sequence position.

Nothing is stored between the two: a normalized value is computed again for each
output that needs it.
"""

from layout.tile_layout import TensorLayout
from layout.tile_tensor import TileTensor
from max.gpu import block_idx
from std.math import sqrt

from .layernorm import EPS


def fused_position[
    dtype: DType,
    output_layout: TensorLayout,
    input_layout: TensorLayout,
    ln_params_layout: TensorLayout,
    weight_layout: TensorLayout,
    bias_layout: TensorLayout,
    //,
    hidden_dim: Int,
    output_dim: Int,
](
    output: TileTensor[mut=True, dtype, output_layout, MutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    ln_weight: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    ln_bias: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    linear_weight: TileTensor[dtype, weight_layout, ImmutAnyOrigin],
    linear_bias: TileTensor[dtype, bias_layout, ImmutAnyOrigin],
    batch_idx: Int,
    seq_idx: Int,
):
    """Computes all outputs of one sequence position.

    Parameters:
        dtype: Element type.
        output_layout: Layout of `output`.
        input_layout: Layout of `input`.
        ln_params_layout: Layout of `ln_weight` and `ln_bias`.
        weight_layout: Layout of `linear_weight`.
        bias_layout: Layout of `linear_bias`.
        hidden_dim: Elements of a position of `input`.
        output_dim: Elements of a position of `output`.

    Args:
        output: Results, `[batch_size, seq_len, output_dim]`.
        input: Rows, `[batch_size, seq_len, hidden_dim]`.
        ln_weight: Scale of each normalized element, `[hidden_dim]`.
        ln_bias: Shift of each normalized element, `[hidden_dim]`.
        linear_weight: Matrix, `[output_dim, hidden_dim]`.
        linear_bias: Added to each output, `[output_dim]`.
        batch_idx: Sequence of the position.
        seq_idx: Index of the position in its sequence.
    """
    comptime assert output.flat_rank == 3, "output must be rank 3"
    comptime assert input.flat_rank == 3, "input must be rank 3"
    comptime assert ln_weight.flat_rank == 1, "ln_weight must be rank 1"
    comptime assert ln_bias.flat_rank == 1, "ln_bias must be rank 1"
    comptime assert linear_weight.flat_rank == 2, "linear_weight must be rank 2"
    comptime assert linear_bias.flat_rank == 1, "linear_bias must be rank 1"

    # Step 1: the statistics of this position, once.
    # FILL IN (roughly 12 lines)
    # As in layernorm_kernel, but one thread does the whole row, so this happens
    # once: mean, variance from the deviations, inv_std.

    var sum_val: Scalar[dtype] = 0
    for h in range(hidden_dim):
        sum_val += rebind[Scalar[dtype]](input[batch_idx, seq_idx, h])
    var mean_val = sum_val / Scalar[dtype](hidden_dim)

    # Squares of deviations, not E[x^2] - E[x]^2: that difference cancels.
    var sq_sum: Scalar[dtype] = 0
    for h in range(hidden_dim):
        var diff = (
            rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
        )
        sq_sum += diff * diff
    var var_val = sq_sum / Scalar[dtype](hidden_dim)
    var inv_std = 1 / sqrt(var_val + EPS)
    # END

    # Step 2: each output is the dot product of the normalized row and a row of
    # the matrix.
    # FILL IN (roughly 13 lines)
    # For every output, sum over h: normalize input[batch_idx, seq_idx, h],
    # scale and shift it, multiply by linear_weight[out_idx, h]. Then add
    # linear_bias[out_idx]. Nothing is stored in between: that is the fusion.

    for out_idx in range(output_dim):
        var acc: Scalar[dtype] = 0
        for h in range(hidden_dim):
            var normalized = (
                rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
            ) * inv_std
            var ln_output = normalized * rebind[Scalar[dtype]](
                ln_weight[h]
            ) + rebind[Scalar[dtype]](ln_bias[h])
            acc += ln_output * rebind[Scalar[dtype]](linear_weight[out_idx, h])
        output[batch_idx, seq_idx, out_idx] = rebind[output.ElementType](
            acc + rebind[Scalar[dtype]](linear_bias[out_idx])
        )
    # END


def minimal_fused_kernel[
    input_layout: TensorLayout,
    ln_params_layout: TensorLayout,
    weight_layout: TensorLayout,
    bias_layout: TensorLayout,
    output_layout: TensorLayout,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    output_dim: Int,
    dtype: DType = DType.float32,
](
    output: TileTensor[mut=True, dtype, output_layout, MutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    ln_weight: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    ln_bias: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    linear_weight: TileTensor[dtype, weight_layout, ImmutAnyOrigin],
    linear_bias: TileTensor[dtype, bias_layout, ImmutAnyOrigin],
):
    """Computes LayerNorm and Linear on a GPU.

    Grid: `(batch_size, seq_len)`. Block: `(1,)`, so that no statistics are
    computed twice.

    Parameters:
        input_layout: Layout of `input`.
        ln_params_layout: Layout of `ln_weight` and `ln_bias`.
        weight_layout: Layout of `linear_weight`.
        bias_layout: Layout of `linear_bias`.
        output_layout: Layout of `output`.
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
    """
    var batch_idx = Int(block_idx.x)
    var seq_idx = Int(block_idx.y)

    if batch_idx >= batch_size or seq_idx >= seq_len:
        return

    fused_position[hidden_dim, output_dim](
        output,
        input,
        ln_weight,
        ln_bias,
        linear_weight,
        linear_bias,
        batch_idx,
        seq_idx,
    )


def minimal_fused_cpu[
    input_layout: TensorLayout,
    ln_params_layout: TensorLayout,
    weight_layout: TensorLayout,
    bias_layout: TensorLayout,
    output_layout: TensorLayout,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    output_dim: Int,
    dtype: DType = DType.float32,
](
    output: TileTensor[mut=True, dtype, output_layout, MutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    ln_weight: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    ln_bias: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    linear_weight: TileTensor[dtype, weight_layout, ImmutAnyOrigin],
    linear_bias: TileTensor[dtype, bias_layout, ImmutAnyOrigin],
):
    """Computes LayerNorm and Linear on a CPU, position after position.

    Parameters:
        input_layout: Layout of `input`.
        ln_params_layout: Layout of `ln_weight` and `ln_bias`.
        weight_layout: Layout of `linear_weight`.
        bias_layout: Layout of `linear_bias`.
        output_layout: Layout of `output`.
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
    """
    for batch_idx in range(batch_size):
        for seq_idx in range(seq_len):
            fused_position[hidden_dim, output_dim](
                output,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                linear_bias,
                batch_idx,
                seq_idx,
            )
