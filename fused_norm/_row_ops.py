"""The row programs as PyTorch knows them: schemas, kernels, fakes, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm import _rowwise, reference
from fused_norm.ops.registration import differentiable, is_forward_mode, register, without_none


def _like(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _trainable_eps_backward(
    grad_output: Tensor, x: Tensor, o: Tensor, mask: list[bool]
) -> list[Tensor]:
    return without_none(_rowwise.trainable_eps_backward(grad_output, x, o, mask), x)


def _div_backward(grad_output: Tensor, a: Tensor, b: Tensor, mask: list[bool]) -> list[Tensor]:
    return without_none(_rowwise.div_backward(grad_output, a, b, mask), a)


def _fake_backward(grad_output: Tensor, x: Tensor, other: Tensor, mask: list[bool]) -> list[Tensor]:
    wanted = zip((x, other), mask, strict=True)
    return without_none([t.new_empty(t.shape) if w else None for t, w in wanted], x)


trainable_eps = register(
    "trainable_eps_layer_norm(Tensor x, Tensor o) -> Tensor",
    _rowwise.trainable_eps_forward,
    _like,
    rows=1,
)
_trainable_eps_gradients = register(
    "trainable_eps_layer_norm_backward(Tensor grad_output, Tensor x, Tensor o, bool[2] mask) "
    "-> (Tensor, Tensor)",
    _trainable_eps_backward,
    _fake_backward,
)
mean = register("composed_mean(Tensor x) -> Tensor", _rowwise.mean, _like, rows=1)
norm = register("composed_norm(Tensor v) -> Tensor", _rowwise.norm_forward, _like, rows=1)
_norm_gradient = register(
    "composed_norm_backward(Tensor grad_output, Tensor v) -> Tensor",
    _rowwise.norm_backward,
    _like,
    rows=2,
)
div = register("composed_div(Tensor a, Tensor b) -> Tensor", _rowwise.div_forward, _like, rows=2)
_div_gradients = register(
    "composed_div_backward(Tensor grad_output, Tensor a, Tensor b, bool[2] mask) "
    "-> (Tensor, Tensor)",
    _div_backward,
    _fake_backward,
    rows=3,
)


class _RowFunction(torch.autograd.Function):
    """What the row programs share: one output, and the inputs kept for the backward."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
        """Keep the inputs."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)


class TrainableEpsLayerNormFunction(_RowFunction):
    """Gradients of x and o."""

    @staticmethod
    def forward(x: Tensor, o: Tensor) -> tuple[Tensor]:
        """Return y."""
        return (trainable_eps(x, o),)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients that are required."""
        if grad_output is None:
            return None, None
        mask = list(ctx.needs_input_grad)
        inputs = (grad_output, *ctx.saved_tensors)
        if torch.is_grad_enabled() or is_forward_mode():
            # A second derivative is being taken: PyTorch's ops have it, the kernels do not.
            return _masked(reference.trainable_eps_layer_norm_backward(*inputs), mask)
        return _masked(_trainable_eps_gradients(*inputs, mask), mask)


class MeanFunction(_RowFunction):
    """Gradient of the mean, which is the mean of the gradient."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor]:
        """Return x - mean(x)."""
        return (mean(x),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
        """Keep nothing."""
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Tensor | None:
        """Return the gradient of x."""
        if grad_output is None:
            return None
        if is_forward_mode():
            return reference.mean(grad_output)
        run = mean_with_gradients if torch.is_grad_enabled() else mean
        gradient: Tensor = run(grad_output)
        return gradient


class NormFunction(_RowFunction):
    """Gradient of the norm."""

    @staticmethod
    def forward(v: Tensor) -> tuple[Tensor]:
        """Return the norm of each row, for every element."""
        return (norm(v),)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Tensor | None:
        """Return the gradient of v."""
        if grad_output is None:
            return None
        (v,) = ctx.saved_tensors
        if torch.is_grad_enabled() or is_forward_mode():
            return reference.norm_backward(grad_output, v)
        gradient: Tensor = _norm_gradient(grad_output, v)
        return gradient


class DivFunction(_RowFunction):
    """Gradients of a quotient."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> tuple[Tensor]:
        """Return a / b."""
        return (div(a, b),)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients that are required."""
        if grad_output is None:
            return None, None
        mask = list(ctx.needs_input_grad)
        inputs = (grad_output, *ctx.saved_tensors)
        if torch.is_grad_enabled() or is_forward_mode():
            return _masked(reference.div_backward(*inputs), mask)
        return _masked(_div_gradients(*inputs, mask), mask)


def _masked(gradients: Any, mask: list[bool]) -> tuple[Tensor | None, ...]:
    return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))


trainable_eps_with_gradients = differentiable(TrainableEpsLayerNormFunction)
mean_with_gradients = differentiable(MeanFunction)
norm_with_gradients = differentiable(NormFunction)
div_with_gradients = differentiable(DivFunction)
