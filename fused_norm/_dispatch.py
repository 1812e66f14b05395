"""Chooses the way a call runs: which module's kernels serve a device, a dtype and a shape."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fused_norm import _cpu, _gpu, _torch

KERNEL_DTYPES = {
    "cpu": frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
    "cuda": frozenset({torch.float32, torch.bfloat16, torch.float16}),
    "meta": frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
}
LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


class Way(Protocol):
    """A module that computes both passes."""

    def forward(
        self,
        x: Tensor,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        eps: float,
        statistics: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return y, and mean and rstd if asked for."""

    def backward(
        self,
        grad_output: Tensor,
        x: Tensor,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
        linear_weight: Tensor,
        mean: Tensor,
        rstd: Tensor,
        eps: float,
        mask: list[bool],
    ) -> list[Tensor | None]:
        """Return the five gradients, None for each that the mask leaves out."""


def way(x: Tensor, linear_weight: Tensor) -> Way:
    """Return the module that computes a call.

    Args:
        x: Input of shape `[..., K]`.
        linear_weight: Weight of shape `[N, K]`.
    """
    if x.numel() == 0 or linear_weight.numel() == 0:
        return _torch
    if x.dtype is not linear_weight.dtype:
        return _torch
    return _cpu if x.device.type == "cpu" else _gpu
