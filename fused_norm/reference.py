"""LayerNorm followed by Linear in plain PyTorch: the maths that every kernel computes.

Written out step by step, for reading and as an oracle. It runs in the dtype of its arguments, so
float64 arguments give a float64 oracle. ``op/README.md`` derives the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layernorm_linear(
    x: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """Apply LayerNorm over the last dimension of ``x`` [..., K], then an affine map to [..., N]."""
    x_hat, _ = _normalize(x, eps)
    return (x_hat * ln_weight + ln_bias) @ linear_weight.T + linear_bias


def layernorm_linear_backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    linear_weight: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``x`` and the four parameters, in the order of the forward pass."""
    x_hat, rstd = _normalize(x, eps)
    grad_normed = grad_output @ linear_weight  # of x_hat * ln_weight + ln_bias, [..., K]

    # Through the affine map of LayerNorm, then through the mean and the variance of the row.
    grad_x_hat = grad_normed * ln_weight
    c1 = grad_x_hat.mean(dim=-1, keepdim=True)
    c2 = (grad_x_hat * x_hat).mean(dim=-1, keepdim=True)
    grad_x = rstd * (grad_x_hat - c1 - x_hat * c2)

    # Parameters are shared by all rows, so their gradients are sums over rows.
    rows = tuple(range(x.dim() - 1))
    grad_ln_weight = (grad_normed * x_hat).sum(dim=rows)
    grad_ln_bias = grad_normed.sum(dim=rows)
    normed = x_hat * ln_weight + ln_bias
    grad_linear_weight = grad_output.flatten(0, -2).T @ normed.flatten(0, -2)
    grad_linear_bias = grad_output.sum(dim=rows)
    return grad_x, grad_ln_weight, grad_ln_bias, grad_linear_weight, grad_linear_bias


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the rows with mean 0 and variance 1, and the reciprocal standard deviation."""
    centered = x - x.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    return centered * rstd, rstd
