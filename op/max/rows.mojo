"""Registers the row ops of op/rows/op.mojo for MAX: one typed signature each.

Tensors are of any rank; their last dimension is the row. Whoever builds a graph declares the shapes of its
outputs, so an op checks that its tensors agree.
"""

from extensibility import (
    InputTensor,
    ManagedTensorSlice,
    OutputTensor,
    register,
)
from max.gpu.host import DeviceContext
from std.sys.info import num_physical_cores

from ..device import Gpu
from ..rows.op import OPS, RowCall
from ..rows.op_cpu import run_op
from ..rows.op_gpu import launch_op
from ..rows.operands import accumulator
from ..team import Team


@register("trainable_eps_layer_norm")
struct TrainableEpsLayerNorm:
    """From input and o `[1]` to v / sqrt(o o + mean(v v)) with v = input - mean(input)."""

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        o: InputTensor[dtype=dtype, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = _call(input)
        call.outputs[0] = _same("output", output, input)
        call.inputs[0] = _address(input)
        call.parameter = _one("o", o)
        _run["trainable_eps_layer_norm", target, dtype](call, ctx)


@register("trainable_eps_layer_norm_backward")
struct TrainableEpsLayerNormBackward:
    """From grad_output, input and o to the gradients of input and o."""

    @doc_hidden
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
        var call = _call(grad_output)
        call.outputs[0] = _same("grad_input", grad_input, grad_output)
        call.parameter_gradient = _one("grad_o", grad_o)
        call.inputs[0] = _address(grad_output)
        call.inputs[1] = _same("input", input, grad_output)
        call.parameter = _one("o", o)
        comptime accum = accumulator[dtype]()
        var shares = ctx.enqueue_create_buffer[accum](call.M)
        call.workspace = Int(shares.unsafe_ptr())
        _run["trainable_eps_layer_norm_backward", target, dtype](call, ctx)
        _ = shares^


@register("composed_mean")
struct ComposedMean:
    """From input to input - mean(input); its own backward."""

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        var call = _call(input)
        call.outputs[0] = _same("output", output, input)
        call.inputs[0] = _address(input)
        _run["composed_mean", target, dtype](call, ctx)


@register("composed_norm")
struct ComposedNorm:
    """From input to sqrt(mean(input input)), for every element of a row."""

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        var call = _call(input)
        call.outputs[0] = _same("output", output, input)
        call.inputs[0] = _address(input)
        _run["composed_norm", target, dtype](call, ctx)


@register("composed_norm_backward")
struct ComposedNormBackward:
    """From grad_output and input to the gradient of input."""

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        grad_input: OutputTensor[dtype=dtype, rank=rank, ...],
        grad_output: InputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        var call = _call(grad_output)
        call.outputs[0] = _same("grad_input", grad_input, grad_output)
        call.inputs[0] = _address(grad_output)
        call.inputs[1] = _same("input", input, grad_output)
        _run["composed_norm_backward", target, dtype](call, ctx)


@register("composed_div")
struct ComposedDiv:
    """From a and b to a / b."""

    @doc_hidden
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, rank: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        a: InputTensor[dtype=dtype, rank=rank, ...],
        b: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        var call = _call(a)
        call.outputs[0] = _same("output", output, a)
        call.inputs[0] = _address(a)
        call.inputs[1] = _same("b", b, a)
        _run["composed_div", target, dtype](call, ctx)


@register("composed_div_backward")
struct ComposedDivBackward:
    """From grad_output, a and b to the gradients of a and b."""

    @doc_hidden
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
        var call = _call(grad_output)
        call.outputs[0] = _same("grad_a", grad_a, grad_output)
        call.outputs[1] = _same("grad_b", grad_b, grad_output)
        call.inputs[0] = _address(grad_output)
        call.inputs[1] = _same("a", a, grad_output)
        call.inputs[2] = _same("b", b, grad_output)
        _run["composed_div_backward", target, dtype](call, ctx)


def _run[
    name: StaticString, target: StaticString, dtype: DType
](call: RowCall, ctx: DeviceContext) raises:
    """Runs the op of a name on the device that MAX runs it on."""
    comptime for i in range(OPS.length):
        comptime if OPS[i].name == name:
            comptime if target == "cpu":
                run_op[OPS[i], dtype](Team(0, num_physical_cores()), call)
            else:
                launch_op[OPS[i], dtype](Gpu(ctx, ctx.stream()), call)
            return
    raise Error(t"op/rows/op.mojo has no {name}")


def _call(rows: ManagedTensorSlice) -> RowCall:
    """Returns a call for rows such as those of a tensor."""
    var M = 1
    comptime for i in range(rows.rank - 1):
        M *= rows.dim_size(i)
    return RowCall(M, rows.dim_size(rows.rank - 1))


def _address(tensor: ManagedTensorSlice) -> Int:
    return Int(tensor.unsafe_ptr())


def _same(
    name: StaticString, tensor: ManagedTensorSlice, like: ManagedTensorSlice
) raises -> Int:
    """Returns the address of a tensor, which has to have the shape of another."""
    var same = tensor.rank == like.rank
    comptime for i in range(min(tensor.rank, like.rank)):
        same = same and tensor.dim_size(i) == like.dim_size(i)
    if not same:
        raise Error(t"{name} must have the shape of the others")
    return _address(tensor)


def _one(name: StaticString, tensor: ManagedTensorSlice) raises -> Int:
    """Returns the address of a tensor, which has to have one element."""
    if tensor.size() != 1:
        raise Error(t"{name} must have one element")
    return _address(tensor)
