"""Registers the ops of fused_norm for MAX graphs and `CustomOpLibrary`."""

from .puzzle.register import LayerNormLinear, LayerNormLinearBackward
