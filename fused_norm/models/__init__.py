"""Whole models: a backend of torch.compile that puts the op family where a model has seams."""

from __future__ import annotations

from fused_norm.models.backend import backend
from fused_norm.models.optimize import optimize
from fused_norm.models.report import Report, explain
from fused_norm.models.sites import Site

__all__ = ["Report", "Site", "backend", "explain", "optimize"]
