"""Norm and rotation of heads: two ops and an autograd function."""

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
    is_forward_mode,
    may_follow,
    without_none,
)
from fused_norm.ops.validation import are_strided, is_onnx_export
from fused_norm.rotation import Heads, Rotation

_TENSORS = "Tensor x, Tensor? gamma, Tensor? cos, Tensor? sin"
_OPTIONS = "bool is_normalized, float eps, float weight_offset, bool is_interleaved, bool is_half"
_COUNT = len(Heads._fields)


def _unpacked(arguments: tuple[Any, ...]) -> tuple[Heads, Rotation]:
    x, *others = arguments[:_COUNT]
    if kernels.pitch_of(x) is None:
        (x,) = in_aligned_memory(x)
    return Heads(x, *in_aligned_memory(*others)), Rotation(*arguments[_COUNT:])


def _forward(*arguments: Any) -> Tensor:
    t, rotation = _unpacked(arguments)
    if kernels.serves(t, rotation):
        return kernels.forward(t, rotation)
    return formulas.by_pytorch(t, rotation).contiguous()


def _fake_forward(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    *rest, wants_gamma = arguments
    t, rotation = _unpacked(tuple(rest))
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


_forward_op = define_in_python(f"rotary({_TENSORS}, {_OPTIONS}) -> Tensor", _forward, _fake_forward)
_backward_op = define_in_python(
    f"rotary_backward(Tensor grad_output, {_TENSORS}, {_OPTIONS}, bool wants_gamma) -> Tensor[]",
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
        wants_x, wants_gamma = ctx.needs_input_grad[:2]
        rest = (None,) * (_COUNT - 2 + len(ctx.options))
        if grad_output is None or not (wants_x or wants_gamma):
            return (None, None, *rest)
        t, rotation = Heads(*ctx.saved_tensors), Rotation(*ctx.options)
        if torch.is_grad_enabled() or is_forward_mode():
            dx, dgamma = _gradients(grad_output, t, rotation, wants_gamma)
        else:
            # Here, so that Inductor writes it so, where the op would copy it alone: the sum over a
            # group of heads that share keys is laid out by heads.
            dx, dgamma = _backward_op(grad_output.contiguous(), *t, *rotation, wants_gamma)
        return (dx if wants_x else None, dgamma if wants_gamma else None, *rest)


_apply = differentiable(RotaryFunction)


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
