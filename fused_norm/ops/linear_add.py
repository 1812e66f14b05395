"""A Linear layer and the residual sum after it, as PyTorch knows them: one product that adds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.backends import seams
from fused_norm.backends.sm90 import may_add
from fused_norm.ops.flops import count_flops
from fused_norm.ops.registration import is_watched, may_follow, register
from fused_norm.ops.seam_validation import is_small
from fused_norm.ops.validation import is_strided, serves_now


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_op = register(
    "linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual) -> Tensor",
    seams.linear_add,
    _fake,
)
count_flops("linear_add", lambda x, weight, *_: 2 * x.numel() * weight.shape[0])


class LinearAdd(torch.autograd.Function):
    """Gradients of the sum. Saved for the backward: x and the weight, as a Linear layer does."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        """Return the sum."""
        ctx.save_for_backward(*tensors[:2])
        total: Tensor = _op(*tensors)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the weight, the bias and the residual."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        rows = grad_output.flatten(0, -2)
        return (
            grad_output @ weight if wanted[0] else None,
            rows.t() @ x.flatten(0, -2) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
            grad_output if wanted[3] else None,
        )


_apply = super(torch.autograd.Function, LinearAdd).apply


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x weight^T + bias: by one product where that is faster.

    Args:
        x: Of shape `[..., K]`.
        weight: Of shape `[N, K]`.
        bias: Of shape `[N]`, or None.
        residual: Of shape `[..., N]`.
    """
    if not _is_ours(x, weight, bias, residual):
        return residual + F.linear(x, weight, bias)
    tensors = (x, weight, bias, residual)
    if may_follow() and any(v is not None and v.requires_grad for v in tensors):
        total: Tensor = (LinearAdd.apply if is_watched() else _apply)(*tensors)
    else:
        total = _op(*tensors)
    return total


def _is_ours(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    """Return whether one product is to add; what is wrong with a call, PyTorch's ops say."""
    tensors = [v for v in (x, weight, bias, residual) if v is not None]
    if torch._C._are_functorch_transforms_active():
        return False
    if not all(isinstance(v, Tensor) and is_strided(v) for v in tensors):
        return False
    if any(v.dtype is not x.dtype or v.device != x.device for v in tensors):
        return False
    if x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return False
    outputs = weight.shape[0]
    if residual.shape != (*x.shape[:-1], outputs) or not x.numel() or not outputs:
        return False
    if bias is not None and bias.shape != (outputs,):
        return False
    if not (serves_now(x, x.dtype) and may_add(x, *weight.shape)):
        return False
    follows = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return is_watched() or not is_small(x.numel() * outputs, x.device, follows)
