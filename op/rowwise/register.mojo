"""Registers the ops that are row programs for MAX graphs and `CustomOpLibrary`.

Tensors are of any rank; their last dimension is the row. An op checks that its tensors agree, since whoever
builds a graph declares the shapes of its outputs.
"""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    register,
)
from max.gpu.host import DeviceContext
from std.sys.info import num_physical_cores

from op.team import Team

from . import ops
from .cpu import Cpu
from .launch import Gpu
from .operands import Operands, RowTarget, accumulator
from .program import RowProgram


def _require_same(
    name: StaticString, tensor: ManagedTensorSlice, like: ManagedTensorSlice
) raises:
    """Raises unless two tensors have one shape."""
    var same = tensor.rank == like.rank
    comptime for i in range(min(tensor.rank, like.rank)):
        same = same and tensor.dim_size(i) == like.dim_size(i)
    if not same:
        raise Error(t"{name} must have the shape of the others")


def _require_one(name: StaticString, tensor: ManagedTensorSlice) raises:
    """Raises unless a tensor has one element."""
    if tensor.size() != 1:
        raise Error(t"{name} must have one element")


def _address(tensor: ManagedTensorSlice) -> Int64:
    return Int64(Int(tensor.unsafe_ptr()))


def _length(tensor: ManagedTensorSlice) -> Int:
    """Returns the number of elements of a row."""
    return tensor.dim_size(tensor.rank - 1)


def _rows(tensor: ManagedTensorSlice) -> Int:
    """Returns the number of rows."""
    var rows = 1
    comptime for i in range(tensor.rank - 1):
        rows *= tensor.dim_size(i)
    return rows


@fieldwise_init
struct _Target[target: StaticString](RowTarget):
    """The device that MAX runs an op on."""

    var ctx: DeviceContext

    def run[
        P: RowProgram, dtype: DType, ftype: DType
    ](self, operands: Operands[accumulator[dtype]()]) raises:
        comptime if Self.target == "cpu":
            _cpu().run[P, dtype, ftype](operands)
        else:
            Gpu(self.ctx, self.ctx.stream()).run[P, dtype, ftype](operands)

    def add_up[
        accum: DType, dtype: DType
    ](self, terms: Int64, count: Int, output: Int64, accumulate: Bool) raises:
        comptime if Self.target == "cpu":
            _cpu().add_up[accum, dtype](terms, count, output, accumulate)
        else:
            Gpu(self.ctx, self.ctx.stream()).add_up[accum, dtype](
                terms, count, output, accumulate
            )


def _cpu() -> Cpu:
    return Cpu(Team(0, num_physical_cores()))


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
        _require_same("output", output, input)
        _require_one("o", o)
        ops.trainable_eps_forward[dtype](
            _Target[target](ctx),
            _address(output),
            _address(input),
            _address(o),
            _rows(input),
            _length(input),
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
        _require_same("grad_input", grad_input, grad_output)
        _require_one("grad_o", grad_o)
        _require_same("input", input, grad_output)
        _require_one("o", o)
        comptime accum = accumulator[dtype]()
        var shares = ctx.enqueue_create_buffer[accum](_rows(input))
        ops.trainable_eps_backward[dtype](
            _Target[target](ctx),
            _address(grad_input),
            _address(grad_o),
            _address(grad_output),
            _address(input),
            _address(o),
            Int64(Int(shares.unsafe_ptr())),
            _rows(input),
            _length(input),
            False,
            False,
        )
        _ = shares^


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
        _require_same("output", output, input)
        ops.mean[dtype](
            _Target[target](ctx),
            _address(output),
            _address(input),
            _rows(input),
            _length(input),
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
        _require_same("output", output, input)
        ops.norm_forward[dtype](
            _Target[target](ctx),
            _address(output),
            _address(input),
            _rows(input),
            _length(input),
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
        _require_same("grad_input", grad_input, grad_output)
        _require_same("input", input, grad_output)
        ops.norm_backward[dtype](
            _Target[target](ctx),
            _address(grad_input),
            _address(grad_output),
            _address(input),
            _rows(grad_output),
            _length(grad_output),
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
        _require_same("output", output, a)
        _require_same("b", b, a)
        ops.div_forward[dtype](
            _Target[target](ctx),
            _address(output),
            _address(a),
            _address(b),
            _rows(a),
            _length(a),
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
        _require_same("grad_a", grad_a, grad_output)
        _require_same("grad_b", grad_b, grad_output)
        _require_same("a", a, grad_output)
        _require_same("b", b, grad_output)
        ops.div_backward[dtype](
            _Target[target](ctx),
            _address(grad_a),
            _address(grad_b),
            _address(grad_output),
            _address(a),
            _address(b),
            _rows(grad_output),
            _length(grad_output),
            False,
        )
