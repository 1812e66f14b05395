"""The same math in plain PyTorch, about a screen for each op.

M rows of K features, N outputs; `x_hat` is the row, centered and scaled:

    mean = sum(x) / K            rstd = 1 / sqrt(sum((x - mean)^2) / K + eps)
    x_hat = (x - mean) * rstd    z = x_hat * gamma + beta    y = z W^T + b

and backward, with `h = (dy W) * gamma` the gradient of `x_hat` and means over the K features of a
row:

    dx = rstd * (h - mean(h) - x_hat * mean(h * x_hat))
    dgamma = sum_M (dy W) * x_hat    dbeta = sum_M dy W    dW = dy^T z    db = sum_M dy

The LayerNorm whose eps is o^2 with a trained o, forward and backward:

    v = x - sum(x) / K           s = sqrt(o^2 + sum(v^2) / K)           y = v / s
    dx = (dy - mean(dy) - v * mean(dy * v) / s^2) / s     do = -o * sum_M sum_K(dy * v) / s^3

and three ops, of which `div(mean(x), norm(mean(x)))` is a LayerNorm:

    mean(x) = x - sum(x) / K       dx = dy - sum(dy) / K
    norm(v) = sqrt(sum(v^2) / K)   dv = v * sum(dy) / (K * norm(v))     one value for all elements
    div(a, b) = a / b              da = dy / b    db = -dy * a / b^2

Everything here is differentiable, so it also serves derivatives that have no kernel.
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

    centered = rows - rows.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    x_hat = centered * rstd
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


def trainable_eps_layer_norm(x: Tensor, o: Tensor) -> Tensor:
    """Apply LayerNorm over the last dimension with eps = o^2.

    Args:
        x: Input of shape `[..., K]`.
        o: Scalar, as a tensor.
    """
    v = mean(x)
    return v / torch.sqrt(torch.square(o) + torch.mean(torch.square(v), -1, keepdim=True))


def trainable_eps_layer_norm_backward(
    grad_output: Tensor, x: Tensor, o: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and `o`, with sums in float32 or wider.

    Args:
        grad_output: Gradient of the output, shape `[..., K]`.
        x: Input of shape `[..., K]`.
        o: Tensor of one element.
    """
    dy, rows, scale = (widened(t) for t in (grad_output, x, o.reshape(())))
    v = mean(rows)
    s = torch.sqrt(scale * scale + v.square().mean(-1, keepdim=True))
    dx = (mean(dy) - v * (dy * v).mean(-1, keepdim=True) / (s * s)) / s
    do = -scale * ((dy * v).sum(-1, keepdim=True) / s**3).sum()
    return dx.to(x.dtype), do.to(o.dtype).reshape(o.shape)


def mean(x: Tensor) -> Tensor:
    """Return `x` without the mean of its last dimension."""
    return x - torch.mean(x, -1, keepdim=True)


def norm(v: Tensor) -> Tensor:
    """Return the root mean square of the last dimension, for each of its elements."""
    return torch.sqrt(torch.mean(torch.square(v), -1, keepdim=True)).expand_as(v).contiguous()


def norm_backward(grad_output: Tensor, v: Tensor) -> Tensor:
    """Return the gradient of `v`, with sums in float32 or wider.

    Args:
        grad_output: Gradient of the norm, shape `[..., K]`.
        v: Input of shape `[..., K]`.
    """
    dy, rows = widened(grad_output), widened(v)
    dv = rows * (dy.mean(-1, keepdim=True) / rows.square().mean(-1, keepdim=True).sqrt())
    return dv.to(v.dtype)


def div(a: Tensor, b: Tensor) -> Tensor:
    """Return `a / b`."""
    return torch.div(a, b)


def div_backward(grad_output: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `a` and `b`.

    Args:
        grad_output: Gradient of the quotient.
        a: The dividend.
        b: The divisor.
    """
    dy, dividend, divisor = (widened(t) for t in (grad_output, a, b))
    da = dy / divisor
    return da.to(a.dtype), (-da * (dividend / divisor)).to(b.dtype)


def composed_layer_norm(x: Tensor) -> Tensor:
    """Return `div(v, norm(v))` of `v = mean(x)`: LayerNorm without an eps."""
    v = mean(x)
    return div(v, norm(v))


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if its dtype is narrower, otherwise itself."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
