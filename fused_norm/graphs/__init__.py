"""The op family in MAX graphs: functions on a graph's values, around the ops of op/max.

A graph loads the ops from the folder `sources()`. Its tensors are matrices of M rows; None means
absent. Dimensions may be symbolic, so that a graph compiles once for all sizes.
"""

from __future__ import annotations

from pathlib import Path

from fused_norm.graphs.family import (
    linear_add,
    linear_add_backward,
    norm_linear,
    norm_linear_backward,
    norm_mlp,
    norm_mlp_backward,
)
from fused_norm.graphs.records import Gradients, Norm, Saved, Value
from fused_norm.native.build import source_root

__all__ = [
    "Gradients",
    "Norm",
    "Saved",
    "Value",
    "linear_add",
    "linear_add_backward",
    "norm_linear",
    "norm_linear_backward",
    "norm_mlp",
    "norm_mlp_backward",
    "sources",
]


def sources() -> Path:
    """Return the folder of ops for `Graph(custom_extensions=[sources()])`."""
    return source_root() / "op"
