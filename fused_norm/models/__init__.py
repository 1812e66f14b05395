"""Whole models: a backend of torch.compile that fuses norms with the Linear layers around them."""

from __future__ import annotations

from fused_norm.models.backend import backend
from fused_norm.models.optimize import optimize
from fused_norm.models.report import Report, explain
from fused_norm.models.sites import Site

__all__ = ["Report", "Site", "backend", "explain", "optimize"]
