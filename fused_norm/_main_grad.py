"""Adds the gradient of a Linear weight to its `main_grad`, as Megatron and TransformerEngine do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_norm._memory import statistics_dtype


def accumulating(
    y: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    eps: float,
) -> Tensor:
    """Return `y`, through which the backward adds the gradient of the weight to its `main_grad`.

    Args:
        y: What the op made of the other arguments without a gradient for the weight, `[..., N]`.
        x: Input of shape `[..., K]`.
        ln_weight: Gamma, shape `[K]`, or None.
        ln_bias: Beta, shape `[K]`, or None.
        linear_weight: Weight of shape `[N, K]` with an attribute `main_grad`.
        eps: Added to the variance.

    Raises:
        RuntimeError: If there is no `main_grad`, or it has another shape or device than the weight,
            or another dtype than sums have: float32, float64 for a weight of float64.
    """
    main_grad = getattr(linear_weight, "main_grad", None)
    dtype = statistics_dtype(linear_weight.dtype)
    if (
        not isinstance(main_grad, Tensor)
        or main_grad.shape != linear_weight.shape
        or main_grad.dtype is not dtype
        or main_grad.device != linear_weight.device
    ):
        got = main_grad
        if isinstance(main_grad, Tensor):
            got = f"{list(main_grad.shape)} of {main_grad.dtype} on {main_grad.device}"
        raise RuntimeError(
            f"fuse_wgrad_accumulation needs weight.main_grad of shape {list(linear_weight.shape)} "
            f"and {dtype} on {linear_weight.device}, got {got}"
        )
    result: Tensor = _Accumulate.apply(y, x, ln_weight, ln_bias, linear_weight, eps)
    return result


class _Accumulate(torch.autograd.Function):
    """Passes y and its gradient on; adds dy^T z to the weight's `main_grad` on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
        linear_weight: Tensor,
        eps: float,
    ) -> Tensor:
        """Return y."""
        ctx.save_for_backward(x, ln_weight, ln_bias, linear_weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of y, and what stands for that of the weight."""
        if grad_output is None:
            return (None,) * 6
        x, ln_weight, ln_bias, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            _add_product(weight.main_grad, grad_output, x, ln_weight, ln_bias, ctx.eps)
        stand_in = None
        if hasattr(weight, "grad_added_to_main_grad"):
            # Megatron's hooks wait for a gradient, whose values they do not read.
            weight.grad_added_to_main_grad = True
            stand_in = torch.empty_like(weight)
            if getattr(weight, "zero_out_wgrad", False):
                stand_in.zero_()
        return grad_output, None, None, None, stand_in, None


def _add_product(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    eps: float,
) -> None:
    """Add dy^T z to a gradient, where z are the normalised rows, without rounding the product."""
    outputs, features = main_grad.shape
    wide = main_grad.dtype
    gamma, beta = (t if t is None else t.to(wide) for t in (ln_weight, ln_bias))
    z = F.layer_norm(x.to(wide), (features,), gamma, beta, eps).reshape(-1, features)
    dy = dy.reshape(-1, outputs)
    if dy.is_cuda and dy.dtype in (torch.bfloat16, torch.float16):
        # Tensor cores multiply what they are given and add up in float32.
        torch.addmm(main_grad, dy.t(), z.to(dy.dtype), out_dtype=wide, out=main_grad)
    else:
        main_grad.addmm_(dy.to(wide).t(), z)
