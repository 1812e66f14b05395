"""Norm -> Linear -> activation of a transformer as one PyTorch operation, with Mojo kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fused_norm import composed
from fused_norm.freeze import freeze, frozen_parameters, unfreeze
from fused_norm.functional import (
    Statistics,
    fused_layernorm_linear,
    linear_add,
    norm_linear,
    norm_mlp,
)
from fused_norm.head import linear_cross_entropy, norm_linear_cross_entropy
from fused_norm.modules import LayerNormLinear, LayerNormMLP, LinearCrossEntropy
from fused_norm.ops.autocast_fp8 import autocast_fp8
from fused_norm.ops.decompositions import decompositions
from fused_norm.ops.invariance import batch_invariant
from fused_norm.qkv import norm_qkv
from fused_norm.trainable_eps import TrainableEpsLayerNorm, trainable_eps_layer_norm

if TYPE_CHECKING:
    from fused_norm.models.optimize import optimize
    from fused_norm.models.report import explain
    from fused_norm.tuning import tune

__version__ = "0.1.0"
__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "LinearCrossEntropy",
    "Statistics",
    "TrainableEpsLayerNorm",
    "__version__",
    "autocast_fp8",
    "batch_invariant",
    "composed",
    "decompositions",
    "explain",
    "freeze",
    "frozen_parameters",
    "fused_layernorm_linear",
    "linear_add",
    "linear_cross_entropy",
    "norm_linear",
    "norm_linear_cross_entropy",
    "norm_mlp",
    "norm_qkv",
    "optimize",
    "trainable_eps_layer_norm",
    "tune",
    "unfreeze",
]


def __getattr__(name: str) -> Any:
    """Import the model passes on first use: they take a quarter of the import time."""
    if name == "tune":
        return importlib.import_module("fused_norm.tuning").tune
    if name not in ("explain", "models", "optimize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    models = importlib.import_module("fused_norm.models")
    return models if name == "models" else getattr(models, name)


def __dir__() -> list[str]:
    """Return the names, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
