"""Registers LayerNorm with a trainable eps for MAX graphs and `CustomOpLibrary`.

Tensors are of any rank; their last dimension is the row. An op checks that its tensors agree, since whoever
builds a graph declares the shapes of its outputs.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from . import ops
from .max_target import (
    Target,
    address_of,
    length_of,
    require_one,
    require_same,
    rows_of,
)
from .operands import accumulator


@register("trainable_eps_layer_norm")
struct TrainableEpsLayerNorm:
    """LayerNorm of the last dimension, its eps the square of a trainable scalar."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        o: InputTensor[dtype=dtype, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes v / sqrt(o o + mean(v v)) with v = input - mean(input).

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: The type of the tensors.
            rank: The rank of the tensors.

        Args:
            output: The result.
            input: The rows.
            o: The scalar, `[1]`.
            ctx: The device.

        Raises:
            If shapes disagree, or the launch fails.
        """
        require_same("output", output, input)
        require_one("o", o)
        ops.trainable_eps_forward[dtype](
            Target[target](ctx),
            address_of(output),
            address_of(input),
            address_of(o),
            rows_of(input),
            length_of(input),
            False,
        )


@register("trainable_eps_layer_norm_backward")
struct TrainableEpsLayerNormBackward:
    """The gradients of `trainable_eps_layer_norm`."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        grad_input: OutputTensor[dtype=dtype, rank=rank, ...],
        grad_o: OutputTensor[dtype=dtype, rank=1, ...],
        grad_output: InputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        o: InputTensor[dtype=dtype, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the gradients of the rows and of the scalar.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: The type of the tensors.
            rank: The rank of the tensors.

        Args:
            grad_input: The gradient of `input`.
            grad_o: The gradient of `o`, `[1]`.
            grad_output: The incoming gradient.
            input: The rows.
            o: The scalar, `[1]`.
            ctx: The device.

        Raises:
            If shapes disagree, or the launch fails.
        """
        require_same("grad_input", grad_input, grad_output)
        require_one("grad_o", grad_o)
        require_same("input", input, grad_output)
        require_one("o", o)
        comptime accum = accumulator[dtype]()
        var shares = ctx.enqueue_create_buffer[accum](rows_of(input))
        ops.trainable_eps_backward[dtype](
            Target[target](ctx),
            address_of(grad_input),
            address_of(grad_o),
            address_of(grad_output),
            address_of(input),
            address_of(o),
            Int64(Int(shares.unsafe_ptr())),
            rows_of(input),
            length_of(input),
            False,
            False,
        )
        _ = shares^
