"""LayerNorm, transpose, product and bias on a CPU, each into its own memory."""

from layout.tile_layout import row_major
from layout.tile_tensor import TileTensor
from std.math import sqrt

from .addresses import Input, Output
from .layernorm import EPS


def unfused_cpu[
    dtype: DType, //, rows: Int, hidden_dim: Int, output_dim: Int
](
    output: Output[dtype],
    input: Input[dtype],
    ln_weight: Input[dtype],
    ln_bias: Input[dtype],
    linear_weight: Input[dtype],
    linear_bias: Input[dtype],
):
    """Computes in four passes what four kernels compute on a GPU.

    Parameters:
        dtype: Element type.
        rows: Positions of all sequences.
        hidden_dim: Elements of a position of `input`.
        output_dim: Elements of a position of `output`.

    Args:
        output: Results, `[rows, output_dim]`.
        input: Rows, `[rows, hidden_dim]`.
        ln_weight: Scale of each normalized element, `[hidden_dim]`.
        ln_bias: Shift of each normalized element, `[hidden_dim]`.
        linear_weight: Matrix, `[output_dim, hidden_dim]`.
        linear_bias: Added to each output, `[output_dim]`.
    """
    var x = TileTensor(input, row_major[rows, hidden_dim]())
    var gamma = TileTensor(ln_weight, row_major[hidden_dim]())
    var beta = TileTensor(ln_bias, row_major[hidden_dim]())
    var weight = TileTensor(linear_weight, row_major[output_dim, hidden_dim]())
    var bias = TileTensor(linear_bias, row_major[output_dim]())
    var y = TileTensor(output, row_major[rows, output_dim]())

    var normalized = List[Scalar[dtype]](length=rows * hidden_dim, fill=0)
    for row in range(rows):
        var sum_val: Scalar[dtype] = 0
        for h in range(hidden_dim):
            sum_val += rebind[Scalar[dtype]](x[row, h])
        var mean_val = sum_val / Scalar[dtype](hidden_dim)
        # Squares of deviations, not E[x^2] - E[x]^2: that difference cancels.
        var sq_sum: Scalar[dtype] = 0
        for h in range(hidden_dim):
            var diff = rebind[Scalar[dtype]](x[row, h]) - mean_val
            sq_sum += diff * diff
        var inv_std = 1 / sqrt(sq_sum / Scalar[dtype](hidden_dim) + EPS)
        for h in range(hidden_dim):
            var diff = rebind[Scalar[dtype]](x[row, h]) - mean_val
            normalized[row * hidden_dim + h] = diff * inv_std * rebind[
                Scalar[dtype]
            ](gamma[h]) + rebind[Scalar[dtype]](beta[h])

    var transposed = List[Scalar[dtype]](length=hidden_dim * output_dim, fill=0)
    for out_idx in range(output_dim):
        for h in range(hidden_dim):
            transposed[h * output_dim + out_idx] = rebind[Scalar[dtype]](
                weight[out_idx, h]
            )

    var product = List[Scalar[dtype]](length=rows * output_dim, fill=0)
    for row in range(rows):
        for h in range(hidden_dim):
            var element = normalized[row * hidden_dim + h]
            for out_idx in range(output_dim):
                product[row * output_dim + out_idx] += (
                    element * transposed[h * output_dim + out_idx]
                )

    for row in range(rows):
        for out_idx in range(output_dim):
            y[row, out_idx] = rebind[y.ElementType](
                product[row * output_dim + out_idx]
                + rebind[Scalar[dtype]](bias[out_idx])
            )
