"""Norm and rotation of heads: ops, and autograd functions, for one tensor and for two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm import rotation as formulas
from fused_norm.chain import rotary as kernels
from fused_norm.chain.kernels import in_aligned_memory
from fused_norm.ops.registration import (
    define_in_python,
    differentiable,
    each_once,
    is_forward_mode,
    may_follow,
    without_none,
)
from fused_norm.ops.validation import are_strided, is_onnx_export
from fused_norm.rotation import Heads, Rotation

_TENSORS = "Tensor x, Tensor? gamma, Tensor? cos, Tensor? sin"
_BOTH = "Tensor x, Tensor? gamma, Tensor second_x, Tensor? second_gamma, Tensor? cos, Tensor? sin"
OPTIONS = "bool is_normalized, float eps, float weight_offset, bool is_interleaved, bool is_half"
_COUNT = len(Heads._fields)
# Tensors of a call on two tensors of heads.
_COUNT_OF_BOTH = _COUNT + 2


def unpacked(arguments: tuple[Any, ...]) -> tuple[Heads, Rotation]:
    """Return the arguments of a call on one tensor, in memory that kernels can read."""
    x, *others = arguments[:_COUNT]
    if kernels.pitch_of(x) is None:
        (x,) = in_aligned_memory(x)
    return Heads(x, *in_aligned_memory(*others)), Rotation(*arguments[_COUNT:])


def _forward(*arguments: Any) -> Tensor:
    t, rotation = unpacked(arguments)
    if kernels.serves(t, rotation):
        return kernels.forward(t, rotation)
    return formulas.by_pytorch(t, rotation).contiguous()


def rotated_both(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return both results of the op on two tensors, by one launch or by two calls."""
    one, other = _of_each(arguments)
    t, rotation = unpacked(one)
    second, _ = unpacked(other)
    if kernels.serves_both(t, second, rotation):
        return kernels.forward_both(t, second, rotation)
    return _forward(*one), _forward(*other)


def rotated_by_pytorch(*arguments: Any) -> Tensor:
    """Return the result of the op with PyTorch's ops."""
    t, rotation = Heads(*arguments[:_COUNT]), Rotation(*arguments[_COUNT:])
    return formulas.by_pytorch(t, rotation).contiguous()


def both_by_pytorch(*arguments: Any) -> tuple[Tensor, ...]:
    """Return both results of the op on two tensors with PyTorch's ops."""
    return tuple(rotated_by_pytorch(*each) for each in _of_each(arguments))


def _of_each(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of the calls on each of two tensors."""
    shared = arguments[_COUNT_OF_BOTH - 2 :]
    return [(*arguments[:2], *shared), (*arguments[2:4], *shared)]


def _fake_forward(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_forward_of_both(x: Tensor, _: Any, second_x: Tensor, *rest: Any) -> Any:
    return _fake_forward(x), _fake_forward(second_x)


def _backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    *rest, wants_gamma = arguments
    t, rotation = unpacked(tuple(rest))
    (dy,) = in_aligned_memory(grad_output)
    if kernels.serves(t, rotation):
        dx, dgamma = kernels.backward(dy, t, rotation, wants_gamma)
    else:
        dx, dgamma = _gradients(dy, t, rotation, wants_gamma)
    # In the layout of x, like PyTorch's elementwise ops.
    like = torch.empty_like(arguments[0], device="meta")
    if dx.stride() != like.stride():
        dx = dx.new_empty_strided(like.shape, like.stride()).copy_(dx)
    return without_none([dx, dgamma], t.x)


def _gradients(dy: Tensor, t: Heads, rotation: Rotation, wants_gamma: bool) -> list[Any]:
    """Return the gradients of x and of gamma, with PyTorch's ops."""

    def run(x: Tensor, gamma: Tensor | None) -> Tensor:
        return formulas.by_pytorch(t._replace(x=x, gamma=gamma), rotation)

    pull: Any
    if not wants_gamma or t.gamma is None:
        pull = torch.func.vjp(lambda x: run(x, t.gamma), t.x)[1]
        return [pull(dy)[0].contiguous(), None]
    pull = torch.func.vjp(run, t.x, t.gamma)[1]
    dx, dgamma = pull(dy)
    return [dx.contiguous(), dgamma]


def _fake_backward(_: Tensor, x: Tensor, gamma: Tensor | None, *rest: Any) -> list[Tensor]:
    dgamma = gamma.new_empty(gamma.shape) if gamma is not None and rest[-1] else None
    return without_none([torch.empty_like(x), dgamma], x)


_forward_op = define_in_python(f"rotary({_TENSORS}, {OPTIONS}) -> Tensor", _forward, _fake_forward)
_forward_of_both_op = define_in_python(
    f"rotary_of_both({_BOTH}, {OPTIONS}) -> (Tensor, Tensor)",
    rotated_both,
    _fake_forward_of_both,
)
_backward_op = define_in_python(
    f"rotary_backward(Tensor grad_output, {_TENSORS}, {OPTIONS}, bool wants_gamma) -> Tensor[]",
    _backward,
    _fake_backward,
)


class RotaryFunction(torch.autograd.Function):
    """The heads, and gradients of x and gamma; saves its arguments for the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor]:
        """Return the result."""
        return (_forward_op(*arguments),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
        """Keep the tensors."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_COUNT])
        ctx.options = inputs[_COUNT:]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Any:
        """Return the gradients that are required."""
        arguments = (*ctx.saved_tensors, *ctx.options)
        grads = _wanted(grad_output, arguments, ctx.needs_input_grad[:2])
        return (*grads, *(None,) * (len(arguments) - 2))


class RotaryOfBothFunction(torch.autograd.Function):
    """Two tensors of heads with the same angles: one forward of both, and a backward of each."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Return both results."""
        found: tuple[Tensor, Tensor] = _forward_of_both_op(*arguments)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the tensors."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_COUNT_OF_BOTH])
        ctx.options = inputs[_COUNT_OF_BOTH:]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        """Return the gradients that are required."""
        arguments = (*ctx.saved_tensors, *ctx.options)
        one, other = _of_each(arguments)
        grads = (
            *_wanted(grad_outputs[0], one, ctx.needs_input_grad[:2]),
            *_wanted(grad_outputs[1], other, ctx.needs_input_grad[2:4]),
        )
        return (*grads, *(None,) * (len(arguments) - 4))


def _wanted(
    grad_output: Tensor | None, arguments: tuple[Any, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of gamma, None for one that is not wanted."""
    wants_x, wants_gamma = wanted
    if grad_output is None or not (wants_x or wants_gamma):
        return None, None
    t, rotation = Heads(*arguments[:_COUNT]), Rotation(*arguments[_COUNT:])
    if torch.is_grad_enabled() or is_forward_mode():
        dx, dgamma = _gradients(grad_output, t, rotation, wants_gamma)
    else:
        # Here, so that Inductor writes it so, where the op would copy it alone: the sum over a
        # group of heads that share keys is laid out by heads.
        dx, dgamma = _backward_op(grad_output.contiguous(), *t, *rotation, wants_gamma)
    return dx if wants_x else None, dgamma if wants_gamma else None


_apply = differentiable(RotaryFunction)
_apply_to_both = differentiable(RotaryOfBothFunction, 2)


def call(t: Heads, rotation: Rotation) -> Tensor:
    """Return the heads, normalized and rotated, in dense memory.

    Args:
        t: The tensors.
        rotation: What to compute.
    """
    follows = may_follow()
    if not _fits(t, rotation) or (follows and _require(t.cos, t.sin)):
        return formulas.by_pytorch(t, rotation)
    if follows and _require(t.x, t.gamma):
        found: Tensor = _apply(*t, *rotation)
        return found
    result: Tensor = _forward_op(*t, *rotation)
    return result


def call_both(t: Heads, second: Heads, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return two tensors of heads, normalized and rotated with the same angles, in dense memory.

    Where a kernel computes both, one launch does, with the bits of two calls. Both then record
    gradients or neither does, as in two calls.

    Args:
        t: The tensors of the first.
        second: Those of the second, with the same cos and sin.
        rotation: What to compute.
    """
    follows = may_follow()
    records = [follows and _require(v.x, v.gamma) for v in (t, second)]
    is_one = (
        (t.cos is second.cos and t.sin is second.sin)
        and records[0] == records[1]
        and not (follows and _require(t.cos, t.sin))
        and are_strided([second.x], t.x)
        and all(_fits(v, rotation) for v in (t, second))
        and kernels.serves_both(t, second, rotation)
    )
    if not is_one:
        return call(t, rotation), call(second, rotation)
    tensors = (t.x, t.gamma, second.x, second.gamma, t.cos, t.sin)
    if any(records):
        found: tuple[Tensor, Tensor] = _apply_to_both(*each_once(tensors), *rotation)
        return found
    result: tuple[Tensor, Tensor] = _forward_of_both_op(*tensors, *rotation)
    return result


def rotate_heads(
    x: Tensor,
    gamma: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    is_normalized: bool,
    eps: float,
    weight_offset: float,
    is_interleaved: bool,
) -> Tensor:
    """Return `call` on separate arguments, as in a graph: the fields of `Heads` and `Rotation`."""
    rotation = Rotation(is_normalized, eps, weight_offset, is_interleaved)
    return call(Heads(x, gamma, cos, sin), rotation)


def rotate_both(
    x: Tensor,
    gamma: Tensor | None,
    second_x: Tensor,
    second_gamma: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """Return `call_both` on separate arguments, as in a graph: `rest` is that of `rotate_heads`."""
    cos, sin, *options = rest
    t, second = Heads(x, gamma, cos, sin), Heads(second_x, second_gamma, cos, sin)
    return call_both(t, second, Rotation(*options))


def _require(*tensors: Tensor | None) -> bool:
    return any(v is not None and v.requires_grad for v in tensors)


def _fits(t: Heads, rotation: Rotation) -> bool:
    """Return whether the op takes a call, and a kernel computes it."""
    given = [v for v in t if v is not None]
    return (
        not is_forward_mode()
        and not is_onnx_export()
        and are_strided(given, t.x)
        and kernels.serves(t, rotation)
    )
