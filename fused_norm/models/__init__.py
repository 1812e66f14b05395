"""Whole models: the backend of torch.compile that puts the op family where a model has its seams."""

from __future__ import annotations

from fused_norm.models.backend import backend
from fused_norm.models.sites import Site

__all__ = ["Site", "backend"]
