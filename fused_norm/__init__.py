"""LayerNorm followed by a Linear layer, forward and backward, as Mojo kernels for PyTorch."""

from __future__ import annotations

from fused_norm.functional import fused_layernorm_linear
from fused_norm.modules import LayerNormLinear

__version__ = "0.1.0"
__all__ = ["LayerNormLinear", "__version__", "fused_layernorm_linear"]
