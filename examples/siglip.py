"""SigLIP of transformers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel
from whole_model import main

UNIT = "images"
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The large one is the vision tower of SigLIP so400m.
SIZES = {"tiny": (256, 1024, 2, 4), "large": (1152, 4304, 27, 16)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    sizes = dict(zip(NAMES, SIZES[size], strict=True))
    side = 56 if size == "tiny" else 384
    config = SiglipVisionConfig(**sizes, image_size=side, patch_size=14)
    return SiglipVisionModel(config), {"pixel_values": torch.randn(batch, 3, side, side)}


def count(inputs: dict[str, Any]) -> int:
    """Return how many images there are in a call."""
    return len(inputs["pixel_values"])


if __name__ == "__main__":
    main(build)
