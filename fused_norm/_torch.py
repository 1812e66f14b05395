"""PyTorch's own ops, for what no kernel serves.

Those are empty tensors and, on a CPU, inputs that autocast would have to convert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import reference
from fused_norm._memory import statistics_dtype
from fused_norm._parameters import Parameters


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y of shape `[..., N]`, and mean and rstd of shape `[...]`."""
    ln_weight, ln_bias, linear_weight, linear_bias = parameters.tensors()
    if x.dtype is not linear_weight.dtype:
        # Autocast: the LayerNorm is float32's, whatever the precision of its input.
        x, ln_weight, ln_bias = x.float(), _wide(ln_weight), _wide(ln_bias)
    z, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)
    y = F.linear(z.to(linear_weight.dtype), linear_weight, linear_bias)
    wide = statistics_dtype(x.dtype)
    return y, mean.reshape(x.shape[:-1]).to(wide), rstd.reshape(x.shape[:-1]).to(wide)


def backward(
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
    """Return the gradients that the mask asks for, None in place of the others."""
    gradients = reference.layernorm_linear_backward(
        grad_output, x, ln_weight, ln_bias, linear_weight, eps
    )
    return [g if wanted else None for g, wanted in zip(gradients, mask, strict=True)]


def functions(x: Tensor, parameters: Parameters) -> None:
    """Return None: PyTorch's ops are no function of ours."""


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()
