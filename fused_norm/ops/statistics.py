"""The ops of the sum before a norm and its statistics, which can end `linear_add`.

If a product has added already, the statistics are computed alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm.call.memory import statistics_dtype
from fused_norm.norms import NORMS
from fused_norm.ops.registration import define, each_once, is_watched, may_follow
from fused_norm.ops.validation import has_row_kernel
from fused_norm.reference import widened


def _fake_rows(x: Tensor, normalization: str, eps: float) -> list[Tensor]:
    count = 2 if NORMS[normalization].has_mean else 1
    wide = statistics_dtype(x.dtype)
    return [x.new_empty(x.shape[:-1], dtype=wide) for _ in range(count)]


def _fake_add(x: Tensor, residual: Tensor, normalization: str, eps: float) -> list[Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [total, *_fake_rows(x, normalization, eps)]


def add_by_pytorch(x: Tensor, residual: Tensor, normalization: str, eps: float) -> list[Tensor]:
    """Return the sum, the mean unless it is RMSNorm's, and the rstd, with PyTorch's ops."""
    total = x + residual
    return [total, *rows_by_pytorch(total, normalization, eps)]


def rows_by_pytorch(x: Tensor, normalization: str, eps: float) -> list[Tensor]:
    """Return the mean, unless it is RMSNorm's, and the rstd of rows, with PyTorch's ops."""
    found = NORMS[normalization].statistics(widened(x.detach()), eps)
    return [each for each in found if each is not None]


_op = define(
    "add_statistics(Tensor x, Tensor residual, str normalization, float eps) -> Tensor[]",
    _fake_add,
    add_by_pytorch,
)
_rows_op = define(
    "row_statistics(Tensor x, str normalization, float eps) -> Tensor[]",
    _fake_rows,
    rows_by_pytorch,
)


class AddStatistics(torch.autograd.Function):
    """Gives both summands the gradient of the sum; statistics have none."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Return the sum and the statistics."""
        total, *statistics = _op(*arguments)
        ctx.mark_non_differentiable(*statistics)
        return (total, *statistics)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        wanted = ctx.needs_input_grad
        return (*(grad_output if w else None for w in wanted[:2]), None, None)


_apply = super(torch.autograd.Function, AddStatistics).apply


def add_statistics(
    x: Tensor, residual: Tensor, normalization: str, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return x + residual, and the mean (None for RMSNorm) and rstd of its rows.

    Args:
        x: Of shape `[..., K]`.
        residual: Of the same shape.
        normalization: The norm that follows.
        eps: Its eps.
    """
    if torch._C._are_functorch_transforms_active() or not has_row_kernel(x, residual):
        total, *statistics = add_by_pytorch(x, residual, normalization, eps)
    elif may_follow() and (x.requires_grad or residual.requires_grad):
        apply = AddStatistics.apply if is_watched() else _apply
        total, *statistics = apply(*each_once((x, residual)), normalization, eps)
    else:
        total, *statistics = _op(x, residual, normalization, eps)
    *mean, rstd = statistics
    return total, mean[0] if mean else None, rstd


def row_statistics(x: Tensor, normalization: str, eps: float) -> tuple[Tensor | None, Tensor]:
    """Return the mean (None for RMSNorm) and rstd of rows, which carry no gradient.

    Args:
        x: Of shape `[..., K]`, with a dtype and a device that have row kernels.
        normalization: The norm that follows.
        eps: Its eps.
    """
    mean, rstd = (None, *_rows_op(x.detach(), normalization, eps))[-2:]
    return mean, rstd
