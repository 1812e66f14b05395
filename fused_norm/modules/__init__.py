"""Modules for models: a norm with the Linear layers on it, or with a whole MLP, as one."""

from __future__ import annotations

from fused_norm.modules.layernorm_linear import LayerNormLinear
from fused_norm.modules.layernorm_mlp import LayerNormMLP
from fused_norm.modules.linear_cross_entropy import LinearCrossEntropy

__all__ = ["LayerNormLinear", "LayerNormMLP", "LinearCrossEntropy"]
