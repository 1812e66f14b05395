"""Adds the gradients of weights to a `main_grad`, instead of returning them to autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.call.memory import LOW_PRECISION


def add(owner: Any, gradient: Tensor) -> None:
    """Add a gradient to the `main_grad` of its Parameter."""
    with torch.no_grad():
        owner.main_grad.add_(gradient)


def add_product(owner: Any, dy: Tensor, z: Tensor) -> None:
    """Add dy^T z to the `main_grad` of a Parameter.

    Args:
        owner: The Parameter, of shape `[N, K]`.
        dy: Gradient of its product, of shape `[M, N]`.
        z: The product's input, of shape `[M, K]`.
    """
    total = owner.main_grad
    if dy.is_cuda and dy.dtype in LOW_PRECISION:
        # Tensor cores multiply 16-bit operands and accumulate in float32.
        torch.addmm(total, dy.t(), z, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(dy.t().to(total.dtype), z.to(total.dtype))


def stand_in(weight: Any) -> Tensor | None:
    """Return a gradient for Megatron's hooks, which wait for one but do not read its values."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    stand_in = torch.empty_like(weight)
    return stand_in.zero_() if getattr(weight, "zero_out_wgrad", False) else stand_in


class _Added(torch.autograd.Function):
    """A weight whose gradient is added to its `main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return the weight."""
        ctx.owner = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        """Add the gradient, and return its placeholder."""
        add(ctx.owner, gradient)
        return stand_in(ctx.owner)


def added(weights: Sequence[Tensor], owners: Sequence[Tensor | None]) -> list[Tensor]:
    """Return weights for PyTorch's ops, with gradients going where kernels would have added them.

    Args:
        weights: Of Linear layers.
        owners: The Parameter of each weight, None if its gradient is autograd's.
    """
    return [
        weight if owner is None else _Added.apply(weight)
        for weight, owner in zip(weights, owners, strict=True)
    ]
