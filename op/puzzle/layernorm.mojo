"""Normalizes the rows of a tensor, one block per row and one thread per element."""

from layout.tile_layout import TensorLayout
from layout.tile_tensor import TileTensor
from max.gpu import block_idx, thread_idx
from std.math import sqrt

comptime EPS = 1e-5
"""Added to the variance before the square root."""


def layernorm_kernel[
    input_layout: TensorLayout,
    ln_params_layout: TensorLayout,
    output_layout: TensorLayout,
    batch_size: Int,
    seq_len: Int,
    hidden_dim: Int,
    dtype: DType = DType.float32,
](
    output: TileTensor[mut=True, dtype, output_layout, MutAnyOrigin],
    input: TileTensor[dtype, input_layout, ImmutAnyOrigin],
    ln_weight: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
    ln_bias: TileTensor[dtype, ln_params_layout, ImmutAnyOrigin],
):
    """Normalizes each sequence position over its hidden dimension.

    Grid: `(batch_size, seq_len)`. Block: `(hidden_dim,)`. Every thread computes
    the statistics of its row for itself: redundant, but no thread waits.

    Parameters:
        input_layout: Layout of `input`.
        ln_params_layout: Layout of `ln_weight` and `ln_bias`.
        output_layout: Layout of `output`.
        batch_size: Number of sequences.
        seq_len: Positions in a sequence.
        hidden_dim: Elements of a position.
        dtype: Element type.

    Args:
        output: Normalized rows, `[batch_size, seq_len, hidden_dim]`.
        input: Rows, `[batch_size, seq_len, hidden_dim]`.
        ln_weight: Scale of each element, `[hidden_dim]`.
        ln_bias: Shift of each element, `[hidden_dim]`.
    """
    comptime assert output.flat_rank == 3, "output must be rank 3"
    comptime assert input.flat_rank == 3, "input must be rank 3"
    comptime assert ln_weight.flat_rank == 1, "ln_weight must be rank 1"
    comptime assert ln_bias.flat_rank == 1, "ln_bias must be rank 1"

    var batch_idx = Int(block_idx.x)
    var seq_idx = Int(block_idx.y)
    var hidden_idx = Int(thread_idx.x)

    if (
        batch_idx >= batch_size
        or seq_idx >= seq_len
        or hidden_idx >= hidden_dim
    ):
        return

    # FILL IN (roughly 19 lines)
    # The block works on one row, and this thread on the element hidden_idx of
    # it.
    # 1. Loop over h twice: sum the elements for the mean, then the squares of
    #    their deviations from it for the variance (divide by hidden_dim). One
    #    loop with E[x^2] - E[x]^2 is shorter, and wrong when the mean is large.
    # 2. inv_std is 1 / sqrt(variance + EPS).
    # 3. Normalize the element, scale it by ln_weight, shift it by ln_bias and
    #    store it.
    # Read with rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]); store with
    # rebind[output.ElementType](value).

    var sum_val: Scalar[dtype] = 0
    var sq_sum: Scalar[dtype] = 0

    for h in range(hidden_dim):
        sum_val += rebind[Scalar[dtype]](input[batch_idx, seq_idx, h])
    var mean_val = sum_val / Scalar[dtype](hidden_dim)

    # Squares of deviations, not E[x^2] - E[x]^2: that difference cancels.
    for h in range(hidden_dim):
        var diff = (
            rebind[Scalar[dtype]](input[batch_idx, seq_idx, h]) - mean_val
        )
        sq_sum += diff * diff
    var var_val = sq_sum / Scalar[dtype](hidden_dim)
    var inv_std = 1 / sqrt(var_val + EPS)

    var normalized = (
        rebind[Scalar[dtype]](input[batch_idx, seq_idx, hidden_idx]) - mean_val
    ) * inv_std
    output[batch_idx, seq_idx, hidden_idx] = rebind[output.ElementType](
        normalized * rebind[Scalar[dtype]](ln_weight[hidden_idx])
        + rebind[Scalar[dtype]](ln_bias[hidden_idx])
    )
    # END
