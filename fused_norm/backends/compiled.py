"""What the C++ node asks of Python: which kernels serve a dtype, a device and its stream."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_norm.backends import cpu, gpu, sm90, sm90_kernels
from fused_norm.call import parameters as known_parameters
from fused_norm.native import build


def kernels(x: Tensor, norm: int, is_alone: bool) -> tuple[str, int, int, str, int]:
    """Return the files of a norm's product and of the passes, each with its calls' context.

    The way that the product's plans are asked for stands behind its context; 0 leaves it to them.

    Args:
        x: A tensor of the dtype, on the device, whose current stream is meant.
        norm: The number of the norm.
        is_alone: Whether no collective runs beside.

    Returns:
        `""` for the product's file where PyTorch's own product is to be taken.

    Raises:
        BuildError: If there are none, and no compiler to build them.
    """
    build.check_at_hand(x.device, x.dtype)
    if x.is_cpu:
        context = build.gomp_parallel()
        product = "" if cpu.is_left_to_pytorch(x) else cpu.library("norm_linear_cpu", x.dtype)
        return product, context, cpu.asked_way(), cpu.library("passes_cpu", x.dtype), context
    return (
        *sm90_kernels.library(x, norm, is_alone),
        0,
        gpu.library("passes_gpu", x),
        gpu.launcher("passes_gpu", x)[1],
    )


def prepare_products(device: int) -> bool:
    """Have PyTorch's products ready in this thread, and return whether they are: not in a capture.

    Args:
        device: Index of the device.
    """
    in_graph = torch.cuda.is_current_stream_capturing()
    sm90_kernels.prepare_products(device, in_graph)
    return not in_graph


def fold(
    norm: int,
    weight_offset: float,
    activation: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *up: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """Return the fold of frozen parameters in dense memory, in two tensors; None for others.

    Args:
        norm: The number of the norm.
        weight_offset: Added to gamma.
        activation: The number of the activation in the epilogue.
        gamma: Weight of the norm.
        beta: Its bias.
        weight: Of the Linear layer.
        bias: Of the Linear layer.
        up: Weight and bias that the others gate, if they are tensors of their own.
    """
    kind = (norm, weight_offset, activation)
    return sm90.frozen_fold(known_parameters.of(gamma, beta, weight, bias, kind, *up))
