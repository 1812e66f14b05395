"""What the C++ node asks of Python: which kernels serve a dtype, a device and its stream."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_norm.backends import cpu, gpu, sm90_kernels
from fused_norm.native import build


def kernels(x: Tensor, norm: int, is_alone: bool) -> tuple[str, int, str, int]:
    """Return the files of a norm's product and of the passes, each with its calls' context.

    Args:
        x: A tensor of the dtype, on the device, whose current stream is meant.
        norm: The number of the norm.
        is_alone: Whether no collective runs beside.

    Returns:
        `""` for the product's file where PyTorch's own product is to be taken.
    """
    if x.is_cpu:
        context = build.gomp_parallel()
        product = "" if cpu.is_left_to_pytorch(x) else cpu.library("norm_linear_cpu", x.dtype)
        return product, context, cpu.library("passes_cpu", x.dtype), context
    return (
        *sm90_kernels.library(x, norm, is_alone),
        gpu.library("passes_gpu", x),
        gpu.launcher("passes_gpu", x)[1],
    )


def conditions() -> tuple[bool, bool]:
    """Return whether no collective runs beside our kernels, and whether a graph captures them."""
    return sm90_kernels.is_alone(), torch.cuda.is_current_stream_capturing()
