"""Layers for `kernels`: a forward each, on the parameters of the module whose place they take.

The module has the parameters of `fused_norm.LayerNormLinear`: layer_norm_weight [K],
layer_norm_bias [K] or None (not read by RMSNorm), weight [N, K], bias [N] or None, and eps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_norm import norm_linear


class LayerNormLinear(torch.nn.Module):
    """LayerNorm of the last dimension, then a Linear layer."""

    has_backward = True
    can_torch_compile = True
    eps: float
    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., N] for rows x [..., K]."""
        y: Tensor = norm_linear(
            x,
            self.weight,
            self.bias,
            norm_weight=self.layer_norm_weight,
            norm_bias=self.layer_norm_bias,
            eps=self.eps,
        )
        return y


class RMSNormLinear(torch.nn.Module):
    """RMSNorm of the last dimension, then a Linear layer."""

    has_backward = True
    can_torch_compile = True
    eps: float
    layer_norm_weight: Tensor
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., N] for rows x [..., K]."""
        y: Tensor = norm_linear(
            x,
            self.weight,
            self.bias,
            normalization="rms_norm",
            norm_weight=self.layer_norm_weight,
            eps=self.eps,
        )
        return y
