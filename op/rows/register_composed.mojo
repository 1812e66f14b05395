"""Registers the functions that LayerNorm is composed of for MAX graphs and `CustomOpLibrary`.

Tensors are of any rank; their last dimension is the row. An op checks that its tensors agree, since whoever
builds a graph declares the shapes of its outputs.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from . import ops
from .max_target import Target, address_of, length_of, require_same, rows_of


@register("composed_mean")
struct ComposedMean:
    """Each row less its mean; its own backward."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes input - mean(input).

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: The type of the tensors.
            rank: The rank of the tensors.

        Args:
            output: The result.
            input: The rows.
            ctx: The device.

        Raises:
            If shapes disagree, or the launch fails.
        """
        require_same("output", output, input)
        ops.mean[dtype](
            Target[target](ctx),
            address_of(output),
            address_of(input),
            rows_of(input),
            length_of(input),
            False,
        )


@register("composed_norm")
struct ComposedNorm:
    """The root of the mean square of each row, for every element."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes sqrt(mean(input input)).

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: The type of the tensors.
            rank: The rank of the tensors.

        Args:
            output: The result.
            input: The rows.
            ctx: The device.

        Raises:
            If shapes disagree, or the launch fails.
        """
        require_same("output", output, input)
        ops.norm_forward[dtype](
            Target[target](ctx),
            address_of(output),
            address_of(input),
            rows_of(input),
            length_of(input),
        )


@register("composed_norm_backward")
struct ComposedNormBackward:
    """The gradient of `composed_norm`."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        grad_input: OutputTensor[dtype=dtype, rank=rank, ...],
        grad_output: InputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the gradient of the rows.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: The type of the tensors.
            rank: The rank of the tensors.

        Args:
            grad_input: The gradient of `input`.
            grad_output: The incoming gradient.
            input: The rows.
            ctx: The device.

        Raises:
            If shapes disagree, or the launch fails.
        """
        require_same("grad_input", grad_input, grad_output)
        require_same("input", input, grad_output)
        ops.norm_backward[dtype](
            Target[target](ctx),
            address_of(grad_input),
            address_of(grad_output),
            address_of(input),
            rows_of(grad_output),
            length_of(grad_output),
            False,
        )


@register("composed_div")
struct ComposedDiv:
    """The quotient of two tensors of one shape."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        a: InputTensor[dtype=dtype, rank=rank, ...],
        b: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes a / b.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: The type of the tensors.
            rank: The rank of the tensors.

        Args:
            output: The result.
            a: The dividend.
            b: The divisor.
            ctx: The device.

        Raises:
            If shapes disagree, or the launch fails.
        """
        require_same("output", output, a)
        require_same("b", b, a)
        ops.div_forward[dtype](
            Target[target](ctx),
            address_of(output),
            address_of(a),
            address_of(b),
            rows_of(a),
            length_of(a),
        )


@register("composed_div_backward")
struct ComposedDivBackward:
    """The gradients of `composed_div`."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        grad_a: OutputTensor[dtype=dtype, rank=rank, ...],
        grad_b: OutputTensor[dtype=dtype, rank=rank, ...],
        grad_output: InputTensor[dtype=dtype, rank=rank, ...],
        a: InputTensor[dtype=dtype, rank=rank, ...],
        b: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Computes the gradients of both operands.

        Parameters:
            target: `"cpu"` or `"gpu"`.
            dtype: The type of the tensors.
            rank: The rank of the tensors.

        Args:
            grad_a: The gradient of `a`.
            grad_b: The gradient of `b`.
            grad_output: The incoming gradient.
            a: The dividend.
            b: The divisor.
            ctx: The device.

        Raises:
            If shapes disagree, or the launch fails.
        """
        require_same("grad_a", grad_a, grad_output)
        require_same("grad_b", grad_b, grad_output)
        require_same("a", a, grad_output)
        require_same("b", b, grad_output)
        ops.div_backward[dtype](
            Target[target](ctx),
            address_of(grad_a),
            address_of(grad_b),
            address_of(grad_output),
            address_of(a),
            address_of(b),
            rows_of(grad_output),
            length_of(grad_output),
            False,
        )
