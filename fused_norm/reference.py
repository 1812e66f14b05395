"""The same mathematics in plain PyTorch, one screen.

M rows of K features, N outputs; `x_hat` is the row without its mean and scale:

    mean = sum(x) / K            rstd = 1 / sqrt(sum((x - mean)^2) / K + eps)
    x_hat = (x - mean) * rstd    z = x_hat * gamma + beta    y = z W^T + b

and backward, with `h = (dy W) * gamma` the gradient of `x_hat` and means over the K features of a
row:

    dx = rstd * (h - mean(h) - x_hat * mean(h * x_hat))
    dgamma = sum_M (dy W) * x_hat    dbeta = sum_M dy W    dW = dy^T z    db = sum_M dy

Everything here is differentiable in turn, so it also serves the derivatives that have no kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def layernorm_linear(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    """Apply LayerNorm over the last dimension, then a Linear layer.

    Args:
        x: Input of shape `[..., K]`.
        ln_weight: Gamma, shape `[K]`, or None for ones.
        ln_bias: Beta, shape `[K]`, or None for zeros.
        linear_weight: Weight of shape `[N, K]`.
        linear_bias: Bias of shape `[N]`, or None for zeros.
        eps: Added to the variance.

    Returns:
        Tensor of shape `[..., N]`.
    """
    z = F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)
    return F.linear(z, linear_weight, linear_bias)


def layernorm_linear_backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    eps: float = 1e-5,
) -> Gradients:
    """Return the five gradients of `layernorm_linear`, with sums in float32 or wider.

    Args:
        grad_output: Gradient of the output, shape `[..., N]`.
        x: Input of shape `[..., K]`.
        ln_weight: Gamma, shape `[K]`, or None.
        ln_bias: Beta, shape `[K]`, or None.
        linear_weight: Weight of shape `[N, K]`.
        eps: Added to the variance.

    Returns:
        Gradients of `x`, `ln_weight`, `ln_bias`, `linear_weight` and `linear_bias`, in their
        shapes and dtypes.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dy, rows, weight = (t.to(wide) for t in (grad_output, x, linear_weight))
    gamma = rows.new_ones(x.shape[-1]) if ln_weight is None else ln_weight.to(wide)
    beta = rows.new_zeros(x.shape[-1]) if ln_bias is None else ln_bias.to(wide)

    centred = rows - rows.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    x_hat = centred * rstd
    dz = dy @ weight
    h = dz * gamma
    dx = rstd * (h - h.mean(-1, keepdim=True) - x_hat * (h * x_hat).mean(-1, keepdim=True))

    # [M, K], [M, N], [M, K]
    dz, dy, x_hat = (
        t.reshape(-1, t.shape[-1]) if t.numel() else t.flatten(0, -2) for t in (dz, dy, x_hat)
    )
    affine_dtype = x.dtype if ln_weight is None else ln_weight.dtype
    return (
        dx.to(x.dtype),
        (dz * x_hat).sum(0).to(affine_dtype),
        dz.sum(0).to(affine_dtype),
        (dy.mT @ (x_hat * gamma + beta)).to(linear_weight.dtype),
        dy.sum(0).to(linear_weight.dtype),
    )
