"""Adds the gradient of a Linear weight to its `main_grad`, as Megatron and TransformerEngine do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_norm import _gpu, _sm90
from fused_norm._dispatch import LOW_PRECISION, way
from fused_norm._memory import statistics_dtype
from fused_norm._ops import layernorm_linear_forward
from fused_norm._registration import are_plain, is_watched
from fused_norm._validation import has_kernel
from fused_norm.functional import fused_layernorm_linear


def accumulating(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return y of shape `[..., N]`, whose backward adds to the `main_grad` of the weight.

    Args:
        x: Input of shape `[..., K]`.
        ln_weight: Gamma, shape `[K]`, or None.
        ln_bias: Beta, shape `[K]`, or None.
        linear_weight: Weight of shape `[N, K]` with an attribute `main_grad`.
        linear_bias: Bias of shape `[N]`, or None.
        eps: Added to the variance.

    Raises:
        RuntimeError: If there is no `main_grad`, or it has another shape or device than the weight,
            or another dtype than sums have: float32, float64 for a weight of float64. And as
            `fused_layernorm_linear` does.
    """
    _require_main_grad(linear_weight)
    inputs = (x, ln_weight, ln_bias, linear_weight, linear_bias)
    if _is_one_call(*inputs, eps):
        y: Tensor = _Fused.apply(*inputs, eps)
        return y
    y = fused_layernorm_linear(x, ln_weight, ln_bias, linear_weight.detach(), linear_bias, eps)
    y = _Accumulate.apply(y, x, ln_weight, ln_bias, linear_weight, eps)
    return y


def _require_main_grad(linear_weight: Tensor) -> None:
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


def _is_one_call(*inputs: Any) -> bool:
    """Return whether one backward makes all gradients: that of a GPU in 16 bits."""
    x, _, _, linear_weight, *_ = inputs
    return (
        not is_watched()
        and not torch._C._is_any_autocast_enabled()
        and are_plain(inputs)
        and x.is_cuda
        and x.dtype in LOW_PRECISION
        and has_kernel(*inputs)
        and way(x, linear_weight) in (_gpu, _sm90)
    )


class _Fused(torch.autograd.Function):
    """The op; its backward adds dy^T z to the weight's `main_grad`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Return y."""
        y: Tensor
        y, mean, rstd = layernorm_linear_forward(*inputs)
        ctx.save_for_backward(*inputs[:4], mean, rstd)
        ctx.eps = inputs[5]
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients, for the weight what stands for its own."""
        if grad_output is None:
            return (None,) * 6
        x, _, _, weight, *_ = saved = ctx.saved_tensors
        run = _sm90 if way(x, weight) is _sm90 else _gpu
        mask = list(ctx.needs_input_grad[:5])
        gradients = run.backward(grad_output, *saved, ctx.eps, mask, weight.main_grad)
        gradients[3] = _stand_in(weight)
        return (*gradients, None)


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
        return grad_output, None, None, None, _stand_in(weight), None


def _stand_in(weight: Tensor) -> Tensor | None:
    """Return a gradient for Megatron's hooks, which wait for one but do not read its values."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    stand_in = torch.empty_like(weight)
    return stand_in.zero_() if getattr(weight, "zero_out_wgrad", False) else stand_in


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
    if dy.is_cuda and dy.dtype in LOW_PRECISION:
        # Tensor cores multiply what they are given and add up in float32.
        torch.addmm(main_grad, dy.t(), z.to(dy.dtype), out_dtype=wide, out=main_grad)
    else:
        main_grad.addmm_(dy.to(wide).t(), z)
