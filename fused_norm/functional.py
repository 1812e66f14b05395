"""What users call: LayerNorm and Linear as one function, LayerNorm with a trained eps."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_norm.ops import norm_linear
from fused_norm.ops.registration import is_watched
from fused_norm.ops.rows import trainable_eps, trainable_eps_forward, trainable_eps_with_gradients
from fused_norm.ops.validation import (
    has_trainable_eps_kernel,
    surely_has_trainable_eps_kernel,
    trainable_eps_by_pytorch,
)


def fused_layernorm_linear(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Apply layer normalization over the last dimension, then an affine map.

    Equivalent to `F.linear(F.layer_norm(x, (K,), ln_weight, ln_bias, eps), linear_weight,
    linear_bias)`, with the same broadcasting, autocast behavior and errors. Statistics and sums
    use float32 (float64 for float64). For the backward only the inputs and the mean and rstd of
    each row are kept; its sums run in a fixed order, so every run gives the same bits.

    Args:
        x: Input of shape `[..., K]`.
        ln_weight: Gamma, shape `[K]`, or None for ones. In the dtype of `x`, or float32 beside
            bfloat16 and float16.
        ln_bias: Beta, shape `[K]`, or None for zeros, in the dtype of `ln_weight`.
        linear_weight: Weight of shape `[N, K]` in the dtype of `x`.
        linear_bias: Bias of shape `[N]` in the dtype of `x`, or None for zeros.
        eps: Added to the variance before the square root.

    Returns:
        Tensor of shape `[..., N]` with the dtype of `x` (of autocast, under autocast).

    Raises:
        RuntimeError: As `F.layer_norm` and `F.linear` do, where shapes, dtypes or devices disagree.
        TypeError: As they do, for an argument that is not a tensor.
        NotImplementedError: As they do, for a dtype that has no LayerNorm.
    """
    return norm_linear.call(x, (ln_weight, ln_bias, linear_weight, linear_bias), eps)


def trainable_eps_layer_norm(x: Tensor, o: Tensor) -> Tensor:
    """Apply layer normalization over the last dimension, with a trained scalar squared as eps.

    `v = x - mean(x)`, `y = v / sqrt(o * o + mean(v * v))`: equivalent to
    `F.layer_norm(x, (K,), eps=o * o)`, and has a gradient for `o`. Statistics and sums use float32
    (float64 for float64). Only the inputs are kept for the backward; its sums run in a fixed order,
    so every run gives the same bits.

    A row without variance is 0 / 0, so NaN, where `o` is 0. There the gradient of `o` is 0 as well.

    Args:
        x: Input of shape `[..., K]`.
        o: Tensor of one element. In the dtype of `x`, or float32 beside bfloat16 and float16.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        RuntimeError: If `o` has not one element, and as PyTorch's ops do.
        TypeError: As they do, for an argument that is not a tensor.
    """
    if not is_watched() and surely_has_trainable_eps_kernel(x, o):
        if not (torch.is_grad_enabled() and (x.requires_grad or o.requires_grad)):
            return trainable_eps_forward(x, o)
    elif not has_trainable_eps_kernel(x, o):
        return trainable_eps_by_pytorch(x, o)
    if torch.is_grad_enabled() and (x.requires_grad or o.requires_grad):
        y: Tensor = trainable_eps_with_gradients(x, o)
    else:
        y = trainable_eps(x, o)
    return y
