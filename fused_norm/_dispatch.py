"""Chooses the way a call runs: which module's kernels serve a device, a dtype and a shape."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fused_norm import _cpu, _gpu, _sm90, _torch
from fused_norm._parameters import Parameters

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
GPU_DTYPES = LOW_PRECISION | {torch.float32}
CPU_DTYPES = GPU_DTYPES | {torch.float64}


def serves(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for a dtype on the device of `x`."""
    return dtype in (GPU_DTYPES if x.is_cuda else CPU_DTYPES) and (
        x.is_cuda or x.is_cpu or x.is_meta
    )


class Way(Protocol):
    """A module that computes both passes."""

    def forward(
        self, x: Tensor, parameters: Parameters, eps: float, statistics: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return y for a dense x, and mean and rstd if asked for."""

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

    def functions(self, x: Tensor, parameters: Parameters) -> tuple[int, ...] | None:
        """Return both passes for code that is not Python, None where there is no such backward.

        x is of the parameters' dtype and on their device; whether it fits them is still to be seen.

        That is for each pass the addresses of a function that counts the bytes of its workspace and
        of the pass itself, 0 for a forward that is Python's, and last the address of what all need
        on the current stream.
        """


def way(x: Tensor, linear_weight: Tensor) -> Way:
    """Return the module that computes a call.

    Args:
        x: Input of shape `[..., K]`.
        linear_weight: Weight of shape `[N, K]`.
    """
    if not x.numel() or not linear_weight.numel():
        return _torch
    if x.dtype is not linear_weight.dtype:
        # Autocast chose the dtype of the weight.
        is_narrow = x.dtype is torch.float32 and linear_weight.dtype in LOW_PRECISION
        return _gpu if x.is_cuda and is_narrow else _torch
    if x.is_cpu:
        return _cpu
    return _sm90 if _sm90.serves(x, linear_weight) else _gpu
