"""Copies of rows in another layout, whose gradients take the layout of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.ops.operands import hint


def memory_order(rows: Tensor) -> list[int]:
    """Return the dimensions of a tensor from the largest stride to the smallest.

    Args:
        rows: The tensor.
    """
    strides = rows.stride()
    return sorted(range(len(strides)), key=lambda dim: -hint(strides[dim]))


def lay_out(rows: Tensor, order: Sequence[int]) -> Tensor:
    """Return a copy of rows in an order of dimensions, and their gradient in the rows' own.

    Inductor fuses such copies with the ops around them. Kernels that are handed rows or gradients
    in another layout than theirs would copy them alone.

    Args:
        rows: A tensor of any shape.
        order: Its dimensions, from the largest stride to the smallest.
    """
    copy: Tensor = _LaidOut.apply(rows, order)
    return copy


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Sequence[int]) -> Tensor:
        ctx.order = memory_order(rows)
        copy = rows.permute(*order).clone(memory_format=torch.contiguous_format)
        return copy.permute(*_back(order))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        return dy[0].permute(*ctx.order).contiguous().permute(*_back(ctx.order)), None


def _back(order: Sequence[int]) -> list[int]:
    return [list(order).index(dim) for dim in range(len(order))]
