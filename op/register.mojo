"""Registers the ops of fused_norm for MAX graphs and `CustomOpLibrary`."""

from .layernorm_linear.register import (
    FusedLayerNormLinear,
    FusedLayerNormLinearBackward,
)
from .puzzle.register import LayerNormLinear, LayerNormLinearBackward
