"""Calls of one Linear layer behind a pass over its rows, and what multiplies in them on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from family import PLAIN

# Options of a call, and what runs in its forward and in its backward.
ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "residual": (
        {"residual": True, "return_sum": True, "normalization": "rms_norm", "bias": False},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    "AdaLN": (
        {"modulation": "batch", "gamma": "missing", "beta": False},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    # PyTorch's product adds to the rows' other gradient.
    "norm returned": ({"return_norm": True}, ["linear"], ["weight_gradient"]),
    "GELU": (
        {"residual": True, "activation": "gelu"},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    "a weight's gate": (
        {"residual": True, "activation": "swiglu"},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    "gate of two": ({"weights": 2, "activation": "geglu", "bias": True}, ["linear"], []),
    "gate of two, no bias": ({"weights": 2, "activation": "reglu", "bias": False}, ["linear"], []),
    "MLP": (
        {"op": "norm_mlp", "activation": "gelu", "residual_out": True},
        ["linear"] * 2,
        ["input_gradient", "weight_gradient"] * 2,
    ),
    "MLP without a residual, recomputed": (
        {"op": "norm_mlp", "activation": "swiglu", "recompute": True},
        ["linear"] * 2,
        ["linear", *["input_gradient", "weight_gradient"] * 2],
    ),
}
SHAPE = ((3, 8), 32, 24)


def case_of(name: str, **others: Any) -> dict[str, Any]:
    return PLAIN | {"dtype": torch.bfloat16, "shape": SHAPE} | ROWS[name][0] | others
