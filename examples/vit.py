"""A vision transformer of timm with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn
from whole_model import main

UNIT = "images"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 192, "depth": 2, "num_heads": 3},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    model = timm.create_model("vit_base_patch16_224", **SIZES[size])
    return model, {"x": torch.randn(batch, 3, 224, 224)}


def count(inputs: dict[str, Any]) -> int:
    """Return how many images there are in a call."""
    return len(inputs["x"])


if __name__ == "__main__":
    main(build)
