"""Registers the puzzle's two ops for MAX graphs and `CustomOpLibrary`."""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    register,
)
from max.gpu.host import DeviceContext

from .launch_backward import launch_backward
from .launch_forward import launch_forward


@register("layernorm_linear")
struct LayerNormLinear:
    """LayerNorm followed by Linear, as Puzzle 22 has it."""

    @staticmethod
    def execute[
        target: StaticString,
        algorithm: StaticString,
        batch_size: Int,
        seq_len: Int,
        hidden_dim: Int,
        output_dim: Int,
    ](
        output: OutputTensor[dtype=DType.float32, rank=3, ...],
        input: InputTensor[dtype=DType.float32, rank=3, ...],
        ln_weight: InputTensor[dtype=DType.float32, rank=1, ...],
        ln_bias: InputTensor[dtype=DType.float32, rank=1, ...],
        linear_weight: InputTensor[dtype=DType.float32, rank=2, ...],
        linear_bias: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes `linear(layer_norm(input))`.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            algorithm: `"fused"` or `"unfused"`.
            batch_size: Number of sequences.
            seq_len: Positions in a sequence.
            hidden_dim: Elements of a position of `input`.
            output_dim: Elements of a position of `output`.

        Args:
            output: Results, `[batch_size, seq_len, output_dim]`.
            input: Rows, `[batch_size, seq_len, hidden_dim]`.
            ln_weight: Scale of each normalized element, `[hidden_dim]`.
            ln_bias: Shift of each normalized element, `[hidden_dim]`.
            linear_weight: Matrix, `[output_dim, hidden_dim]`.
            linear_bias: Added to each output, `[output_dim]`.
            ctx: The device.

        Raises:
            If a parameter disagrees with a tensor, or the launch fails.
        """
        _require_shape["output"](output, batch_size, seq_len, output_dim)
        _require_shape["input"](input, batch_size, seq_len, hidden_dim)
        _require_shape["ln_weight"](ln_weight, hidden_dim)
        _require_shape["ln_bias"](ln_bias, hidden_dim)
        _require_shape["linear_weight"](linear_weight, output_dim, hidden_dim)
        _require_shape["linear_bias"](linear_bias, output_dim)
        launch_forward[
            target, algorithm, batch_size, seq_len, hidden_dim, output_dim
        ](
            output.unsafe_ptr(),
            input.unsafe_ptr(),
            ln_weight.unsafe_ptr(),
            ln_bias.unsafe_ptr(),
            linear_weight.unsafe_ptr(),
            linear_bias.unsafe_ptr(),
            ctx,
        )


@register("layernorm_linear_backward")
struct LayerNormLinearBackward:
    """The gradients of LayerNorm followed by Linear, as Puzzle 22 has it."""

    @staticmethod
    def execute[
        target: StaticString,
        batch_size: Int,
        seq_len: Int,
        hidden_dim: Int,
        output_dim: Int,
    ](
        grad_input: OutputTensor[dtype=DType.float32, rank=3, ...],
        grad_ln_weight: OutputTensor[dtype=DType.float32, rank=1, ...],
        grad_ln_bias: OutputTensor[dtype=DType.float32, rank=1, ...],
        grad_weight: OutputTensor[dtype=DType.float32, rank=2, ...],
        grad_bias: OutputTensor[dtype=DType.float32, rank=1, ...],
        grad_output: InputTensor[dtype=DType.float32, rank=3, ...],
        input: InputTensor[dtype=DType.float32, rank=3, ...],
        ln_weight: InputTensor[dtype=DType.float32, rank=1, ...],
        ln_bias: InputTensor[dtype=DType.float32, rank=1, ...],
        linear_weight: InputTensor[dtype=DType.float32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the gradients for an incoming gradient.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            batch_size: Number of sequences.
            seq_len: Positions in a sequence.
            hidden_dim: Elements of a position of `input`.
            output_dim: Elements of a position of `grad_output`.

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
            If a parameter disagrees with a tensor, or the launch fails.
        """
        _require_shape["grad_input"](
            grad_input, batch_size, seq_len, hidden_dim
        )
        _require_shape["grad_ln_weight"](grad_ln_weight, hidden_dim)
        _require_shape["grad_ln_bias"](grad_ln_bias, hidden_dim)
        _require_shape["grad_weight"](grad_weight, output_dim, hidden_dim)
        _require_shape["grad_bias"](grad_bias, output_dim)
        _require_shape["grad_output"](
            grad_output, batch_size, seq_len, output_dim
        )
        _require_shape["input"](input, batch_size, seq_len, hidden_dim)
        _require_shape["ln_weight"](ln_weight, hidden_dim)
        _require_shape["ln_bias"](ln_bias, hidden_dim)
        _require_shape["linear_weight"](linear_weight, output_dim, hidden_dim)
        launch_backward[target, batch_size, seq_len, hidden_dim, output_dim](
            grad_input.unsafe_ptr(),
            grad_ln_weight.unsafe_ptr(),
            grad_ln_bias.unsafe_ptr(),
            grad_weight.unsafe_ptr(),
            grad_bias.unsafe_ptr(),
            grad_output.unsafe_ptr(),
            input.unsafe_ptr(),
            ln_weight.unsafe_ptr(),
            ln_bias.unsafe_ptr(),
            linear_weight.unsafe_ptr(),
            ctx,
        )


def _require_shape[
    name: StaticString
](tensor: ManagedTensorSlice, *expected: Int) raises:
    """Raises unless a tensor has the sizes that the parameters promise."""
    for i in range(tensor.rank):
        if tensor.dim_size(i) != expected[i]:
            raise Error(
                name,
                ": dimension ",
                i,
                " is ",
                tensor.dim_size(i),
                ", but the op's parameters say ",
                expected[i],
            )
