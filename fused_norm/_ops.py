"""The LayerNorm + Linear ops as PyTorch knows them: schemas, kernels, fakes, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm import reference
from fused_norm._dispatch import way
from fused_norm._memory import empty_gradients, empty_statistics
from fused_norm._registration import differentiable, is_forward_mode, register, without_none


def _y(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> Tensor:
    run = way(x, linear_weight).forward
    return run(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, False)[0]


def _forward(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    run = way(x, linear_weight).forward
    return run(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, True)


def _backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    mask: list[bool],
) -> list[Tensor]:
    run = way(x, linear_weight).backward
    gradients = run(grad_output, x, ln_weight, ln_bias, linear_weight, mean, rstd, eps, mask)
    return without_none(gradients, x)


def _fake_y(x: Tensor, ln_weight: Any, ln_bias: Any, linear_weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], linear_weight.shape[0]), dtype=linear_weight.dtype)


def _fake_forward(x: Tensor, *parameters: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_y(x, *parameters), *empty_statistics(x)


def _fake_backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    mask: list[bool],
) -> list[Tensor]:
    return without_none(empty_gradients(x, ln_weight, ln_bias, linear_weight, mask), x)


_INPUTS = "Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor linear_weight"
layernorm_linear = register(
    f"layernorm_linear({_INPUTS}, Tensor? linear_bias, float eps) -> Tensor",
    _y,
    _fake_y,
    rows=1,
)
layernorm_linear_forward = register(
    f"layernorm_linear_forward({_INPUTS}, Tensor? linear_bias, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    rows=1,
)
layernorm_linear_backward = register(
    f"layernorm_linear_backward(Tensor grad_output, {_INPUTS}, Tensor mean, Tensor rstd, "
    "float eps, bool[5] mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


class LayerNormLinearFunction(torch.autograd.Function):
    """Gradients of the op. Saved for the backward: the input, the parameters, mean and rstd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, mean and rstd."""
        y, mean, rstd = layernorm_linear_forward(*arguments)
        return y, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward needs."""
        x, ln_weight, ln_bias, linear_weight, _, eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, ln_weight, ln_bias, linear_weight, *output[1:])
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the five tensors that require one."""
        if grad_output is None:
            return (None,) * 6
        x, ln_weight, ln_bias, linear_weight, mean, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:5])
        if torch.is_grad_enabled() or is_forward_mode():
            # A second derivative is being taken: PyTorch's ops have it, the kernels do not.
            inputs = (grad_output, x, ln_weight, ln_bias, linear_weight)
            gradients = reference.layernorm_linear_backward(*inputs, ctx.eps)
        else:
            gradients = layernorm_linear_backward(
                grad_output, x, ln_weight, ln_bias, linear_weight, mean, rstd, ctx.eps, mask
            )
        return (*(g if wanted else None for g, wanted in zip(gradients, mask, strict=True)), None)


layernorm_linear_with_gradients = differentiable(LayerNormLinearFunction)
