"""Computes all five gradients in one kernel, one thread per sequence position.

The gradients of the parameters are sums over positions, so positions add to them
with atomic operations; they must be zero before the first position starts.
"""

from layout.tile_layout import TensorLayout
from layout.tile_tensor import TileTensor
from max.gpu import block_idx
from std.atomic import Atomic, Ordering
from std.math import sqrt

from .layernorm import EPS


def fused_position_backward[
    dtype: DType,
    grad_output_layout: TensorLayout,
    input_layout: TensorLayout,
    ln_params_layout: TensorLayout,
    weight_layout: TensorLayout,
    grad_input_layout: TensorLayout,
    grad_ln_weight_layout: TensorLayout,
    grad_ln_bias_layout: TensorLayout,
    grad_weight_layout: TensorLayout,
    grad_bias_layout: TensorLayout,
    //,
    hidden_dim: Int,
    output_dim: Int,
](
    grad_input: TileTensor[mut=True, dtype, grad_input_layout, MutAnyOrigin],
    grad_ln_weight: TileTensor[
        mut=True, dtype, grad_ln_weight_layout, MutAnyOrigin
    ],
    grad_ln_bias: TileTensor[
        mut=True, dtype, grad_ln_bias_layout, MutAnyOrigin
    ],
    grad_weight: TileTensor[mut=True, dtype, grad_weight_layout, MutAnyOrigin],
    grad_bias: TileTensor[mut=True, dtype, grad_bias_layout, MutAnyOrigin],
    grad_output: TileTensor[dtype, grad_output_layout, ImmutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    ln_weight: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    ln_bias: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    linear_weight: TileTensor[dtype, weight_layout, ImmutAnyOrigin],
    batch_idx: Int,
    seq_idx: Int,
):
    """Computes what one sequence position gives to every gradient.

    Parameters:
        dtype: Element type.
        grad_output_layout: Layout of `grad_output`.
        input_layout: Layout of `input`.
        ln_params_layout: Layout of `ln_weight` and `ln_bias`.
        weight_layout: Layout of `linear_weight`.
        grad_input_layout: Layout of `grad_input`.
        grad_ln_weight_layout: Layout of `grad_ln_weight`.
        grad_ln_bias_layout: Layout of `grad_ln_bias`.
        grad_weight_layout: Layout of `grad_weight`.
        grad_bias_layout: Layout of `grad_bias`.
        hidden_dim: Elements of a position of `input`.
        output_dim: Elements of a position of `grad_output`.

    Args:
        grad_input: Set for this position, `[batch_size, seq_len, hidden_dim]`.
        grad_ln_weight: Added to, `[hidden_dim]`.
        grad_ln_bias: Added to, `[hidden_dim]`.
        grad_weight: Added to, `[output_dim, hidden_dim]`.
        grad_bias: Added to, `[output_dim]`.
        grad_output: Incoming gradient, `[batch_size, seq_len, output_dim]`.
        input: Rows of the forward pass, `[batch_size, seq_len, hidden_dim]`.
        ln_weight: Scale of each normalized element, `[hidden_dim]`.
        ln_bias: Shift of each normalized element, `[hidden_dim]`.
        linear_weight: Matrix, `[output_dim, hidden_dim]`.
        batch_idx: Sequence of the position.
        seq_idx: Index of the position in its sequence.
    """
    comptime assert grad_input.flat_rank == 3, "grad_input must be rank 3"
    comptime assert grad_output.flat_rank == 3, "grad_output must be rank 3"
    comptime assert input.flat_rank == 3, "input must be rank 3"
    comptime assert ln_weight.flat_rank == 1, "ln_weight must be rank 1"
    comptime assert ln_bias.flat_rank == 1, "ln_bias must be rank 1"
    comptime assert linear_weight.flat_rank == 2, "linear_weight must be rank 2"

    # Step 1: the statistics of the forward pass, once more.
    # FILL IN (roughly 12 lines)
    # The same mean, variance and inv_std as in the forward pass.

    var sum_val: Scalar[dtype] = 0
    for h in range(hidden_dim):
        sum_val += rebind[Scalar[dtype]](input[batch_idx, seq_idx, h])
    var mean_val = sum_val / Scalar[dtype](hidden_dim)

    var sq_sum: Scalar[dtype] = 0
    for h in range(hidden_dim):
        var diff = (
            rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
        )
        sq_sum += diff * diff
    var var_val = sq_sum / Scalar[dtype](hidden_dim)
    var inv_std = 1 / sqrt(var_val + EPS)
    # END

    # Step 2: the gradient of the linear bias is the sum of grad_output.
    # FILL IN (roughly 5 lines)
    # Use _add: other positions add to the same numbers at the same time. The
    # address of element i of a tensor t is t.ptr.unsafe_offset(i).

    for out_idx in range(output_dim):
        _add(
            grad_bias.ptr.unsafe_offset(out_idx),
            rebind[Scalar[dtype]](grad_output[batch_idx, seq_idx, out_idx]),
        )
    # END

    # Step 3: the gradient of the linear weight is the sum of the outer products
    # of grad_output and the normalized row.
    # FILL IN (roughly 15 lines)
    # For every output and every h: grad_output times what the forward pass
    # multiplied that weight by. A matrix is stored row by row.

    for out_idx in range(output_dim):
        var grad_out = rebind[Scalar[dtype]](
            grad_output[batch_idx, seq_idx, out_idx]
        )
        for h in range(hidden_dim):
            var normalized = (
                rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
            ) * inv_std
            var ln_output = normalized * rebind[Scalar[dtype]](
                ln_weight[h]
            ) + rebind[Scalar[dtype]](ln_bias[h])
            _add(
                grad_weight.ptr.unsafe_offset(out_idx * hidden_dim + h),
                grad_out * ln_output,
            )
    # END

    # Step 4: the gradients of the LayerNorm parameters.
    # FILL IN (roughly 11 lines)
    # First carry the gradient back through the matrix: for one h, sum over all
    # outputs grad_output times linear_weight. That is the gradient of
    # ln_bias[h]; times the normalized element it is the one of ln_weight[h].

    for h in range(hidden_dim):
        var normalized = (
            rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
        ) * inv_std
        var grad_ln_out: Scalar[dtype] = 0
        for out_idx in range(output_dim):
            grad_ln_out += rebind[Scalar[dtype]](
                grad_output[batch_idx, seq_idx, out_idx]
            ) * rebind[Scalar[dtype]](linear_weight[out_idx, h])
        _add(grad_ln_weight.ptr.unsafe_offset(h), grad_ln_out * normalized)
        _add(grad_ln_bias.ptr.unsafe_offset(h), grad_ln_out)
    # END

    # Step 5: the gradient of the input. First the two sums over the row by which
    # its elements act on each other, through the mean and the variance.
    # FILL IN (roughly 14 lines)
    # grad_norm is the gradient of a normalized element: what came through the
    # matrix, times ln_weight. Over the row, sum grad_norm, and sum grad_norm
    # times the normalized element.

    var sum_grad_normalized: Scalar[dtype] = 0
    var sum_grad_normalized_times_normalized: Scalar[dtype] = 0
    for h in range(hidden_dim):
        var normalized = (
            rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
        ) * inv_std
        var grad_ln_out: Scalar[dtype] = 0
        for out_idx in range(output_dim):
            grad_ln_out += rebind[Scalar[dtype]](
                grad_output[batch_idx, seq_idx, out_idx]
            ) * rebind[Scalar[dtype]](linear_weight[out_idx, h])
        var grad_norm = grad_ln_out * rebind[Scalar[dtype]](ln_weight[h])
        sum_grad_normalized += grad_norm
        sum_grad_normalized_times_normalized += grad_norm * normalized
    # END

    # Then each element, which no other position touches.
    # FILL IN (roughly 20 lines)
    # grad_norm, less its mean over the row, less the normalized element times
    # the other sum's mean; all of it times inv_std. op/README.md derives this.

    for h in range(hidden_dim):
        var normalized = (
            rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
        ) * inv_std
        var grad_ln_out: Scalar[dtype] = 0
        for out_idx in range(output_dim):
            grad_ln_out += rebind[Scalar[dtype]](
                grad_output[batch_idx, seq_idx, out_idx]
            ) * rebind[Scalar[dtype]](linear_weight[out_idx, h])
        var grad_norm = grad_ln_out * rebind[Scalar[dtype]](ln_weight[h])
        grad_input[batch_idx, seq_idx, h] = rebind[grad_input.ElementType](
            inv_std
            * (
                grad_norm
                - sum_grad_normalized / Scalar[dtype](hidden_dim)
                - normalized
                * sum_grad_normalized_times_normalized
                / Scalar[dtype](hidden_dim)
            )
        )
    # END


def _add[
    dtype: DType, //
](address: Pointer[mut=True, Scalar[dtype], _], value: Scalar[dtype]):
    """Adds to a number that other positions may be adding to.

    Only the sum matters, not the order of what else the threads read and write.
    """
    _ = Atomic.fetch_add[ordering=Ordering.RELAXED](address, value)


def minimal_fused_kernel_backward[
    grad_output_layout: TensorLayout,
    input_layout: TensorLayout,
    ln_params_layout: TensorLayout,
    weight_layout: TensorLayout,
    grad_input_layout: TensorLayout,
    grad_ln_weight_layout: TensorLayout,
    grad_ln_bias_layout: TensorLayout,
    grad_weight_layout: TensorLayout,
    grad_bias_layout: TensorLayout,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    output_dim: Int,
    dtype: DType = DType.float32,
](
    grad_input: TileTensor[mut=True, dtype, grad_input_layout, MutAnyOrigin],
    grad_ln_weight: TileTensor[
        mut=True, dtype, grad_ln_weight_layout, MutAnyOrigin
    ],
    grad_ln_bias: TileTensor[
        mut=True, dtype, grad_ln_bias_layout, MutAnyOrigin
    ],
    grad_weight: TileTensor[mut=True, dtype, grad_weight_layout, MutAnyOrigin],
    grad_bias: TileTensor[mut=True, dtype, grad_bias_layout, MutAnyOrigin],
    grad_output: TileTensor[dtype, grad_output_layout, ImmutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    ln_weight: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    ln_bias: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    linear_weight: TileTensor[dtype, weight_layout, ImmutAnyOrigin],
):
    """Computes all five gradients on a GPU.

    Grid: `(batch_size, seq_len)`. Block: `(1,)`. The gradients of the parameters
    must be zero before the launch: no block can know that it runs first.

    Parameters:
        grad_output_layout: Layout of `grad_output`.
        input_layout: Layout of `input`.
        ln_params_layout: Layout of `ln_weight` and `ln_bias`.
        weight_layout: Layout of `linear_weight`.
        grad_input_layout: Layout of `grad_input`.
        grad_ln_weight_layout: Layout of `grad_ln_weight`.
        grad_ln_bias_layout: Layout of `grad_ln_bias`.
        grad_weight_layout: Layout of `grad_weight`.
        grad_bias_layout: Layout of `grad_bias`.
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
    """
    var batch_idx = Int(block_idx.x)
    var seq_idx = Int(block_idx.y)

    if batch_idx >= batch_size or seq_idx >= seq_len:
        return

    fused_position_backward[hidden_dim, output_dim](
        grad_input,
        grad_ln_weight,
        grad_ln_bias,
        grad_weight,
        grad_bias,
        grad_output,
        input,
        ln_weight,
        ln_bias,
        linear_weight,
        batch_idx,
        seq_idx,
    )


def minimal_fused_cpu_backward[
    grad_output_layout: TensorLayout,
    input_layout: TensorLayout,
    ln_params_layout: TensorLayout,
    weight_layout: TensorLayout,
    grad_input_layout: TensorLayout,
    grad_ln_weight_layout: TensorLayout,
    grad_ln_bias_layout: TensorLayout,
    grad_weight_layout: TensorLayout,
    grad_bias_layout: TensorLayout,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    output_dim: Int,
    dtype: DType = DType.float32,
](
    grad_input: TileTensor[mut=True, dtype, grad_input_layout, MutAnyOrigin],
    grad_ln_weight: TileTensor[
        mut=True, dtype, grad_ln_weight_layout, MutAnyOrigin
    ],
    grad_ln_bias: TileTensor[
        mut=True, dtype, grad_ln_bias_layout, MutAnyOrigin
    ],
    grad_weight: TileTensor[mut=True, dtype, grad_weight_layout, MutAnyOrigin],
    grad_bias: TileTensor[mut=True, dtype, grad_bias_layout, MutAnyOrigin],
    grad_output: TileTensor[dtype, grad_output_layout, ImmutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    ln_weight: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    ln_bias: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    linear_weight: TileTensor[dtype, weight_layout, ImmutAnyOrigin],
):
    """Computes all five gradients on a CPU, position after position.

    The gradients of the parameters must be zero before.

    Parameters:
        grad_output_layout: Layout of `grad_output`.
        input_layout: Layout of `input`.
        ln_params_layout: Layout of `ln_weight` and `ln_bias`.
        weight_layout: Layout of `linear_weight`.
        grad_input_layout: Layout of `grad_input`.
        grad_ln_weight_layout: Layout of `grad_ln_weight`.
        grad_ln_bias_layout: Layout of `grad_ln_bias`.
        grad_weight_layout: Layout of `grad_weight`.
        grad_bias_layout: Layout of `grad_bias`.
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
    """
    for batch_idx in range(batch_size):
        for seq_idx in range(seq_len):
            fused_position_backward[hidden_dim, output_dim](
                grad_input,
                grad_ln_weight,
                grad_ln_bias,
                grad_weight,
                grad_bias,
                grad_output,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                batch_idx,
                seq_idx,
            )
