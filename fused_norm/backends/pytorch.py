"""PyTorch's own ops, for what no kernel serves: empty tensors, inputs that autocast converts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import reference
from fused_norm.call.memory import statistics_dtype
from fused_norm.call.parameters import LAYER_NORM, Parameters


def accepts(x: Tensor, parameters: Parameters) -> bool:
    """Return whether the norm is PyTorch's own, for which it has an op that serves everything."""
    return parameters.norm == LAYER_NORM


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and rstd."""
    gamma, beta, weight, bias = parameters.tensors
    if x.dtype is not weight.dtype:
        # Under autocast a norm computes in float32, whatever the precision of its input.
        x = x.float()
        gamma, beta = (t if t is None else t.float() for t in (gamma, beta))
    z, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gamma, beta, eps)
    y = F.linear(z.to(weight.dtype), weight, bias)
    wide = statistics_dtype(x.dtype)
    return y, mean.reshape(x.shape[:-1]).to(wide), rstd.reshape(x.shape[:-1]).to(wide)


def backward(
    grad_output: Tensor,
    x: Tensor,
    parameters: Parameters,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    wanted: list[bool],
    main_grad: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients that are wanted."""
    gamma, beta, weight, _ = parameters.tensors
    gradients = reference.layernorm_linear_backward(grad_output, x, gamma, beta, weight, eps)
    kept = [g if wanted else None for g, wanted in zip(gradients, wanted, strict=True)]
    if main_grad is not None:
        kept[3] = None
        reference.add_weight_gradient(main_grad, grad_output, x, gamma, beta, eps)
    return kept
