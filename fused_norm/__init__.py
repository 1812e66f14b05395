"""LayerNorm followed by a Linear layer, as Mojo kernels for PyTorch."""

from __future__ import annotations

__version__ = "0.1.0"
