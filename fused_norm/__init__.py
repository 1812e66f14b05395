"""LayerNorm followed by a Linear layer, forward and backward, as Mojo kernels for PyTorch."""

from __future__ import annotations

from fused_norm import composed
from fused_norm.call.folds import frozen_parameters
from fused_norm.functional import fused_layernorm_linear, trainable_eps_layer_norm
from fused_norm.modules import LayerNormLinear, TrainableEpsLayerNorm

__version__ = "0.1.0"
__all__ = [
    "LayerNormLinear",
    "TrainableEpsLayerNorm",
    "__version__",
    "composed",
    "frozen_parameters",
    "fused_layernorm_linear",
    "trainable_eps_layer_norm",
]
