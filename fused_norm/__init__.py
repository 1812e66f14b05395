"""The seams of a transformer, norm -> Linear -> activation, as Mojo kernels for PyTorch."""

from __future__ import annotations

from fused_norm import composed
from fused_norm.call.folds import frozen_parameters
from fused_norm.functional import (
    Statistics,
    fused_layernorm_linear,
    linear_add,
    norm_linear,
    norm_mlp,
)
from fused_norm.models import explain, optimize
from fused_norm.modules import LayerNormLinear, LayerNormMLP
from fused_norm.ops.decompositions import decompositions
from fused_norm.ops.invariance import batch_invariant
from fused_norm.trainable_eps import TrainableEpsLayerNorm, trainable_eps_layer_norm

__version__ = "0.1.0"
__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Statistics",
    "TrainableEpsLayerNorm",
    "__version__",
    "batch_invariant",
    "composed",
    "decompositions",
    "explain",
    "frozen_parameters",
    "fused_layernorm_linear",
    "linear_add",
    "norm_linear",
    "norm_mlp",
    "optimize",
    "trainable_eps_layer_norm",
]
