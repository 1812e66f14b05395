"""A diffusion transformer of diffusers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiTTransformer2DModel
from torch import nn
from whole_model import main

UNIT = "images"
# Heads, features of each, layers, pixels of a latent image; the large one is DiT-XL/2.
SIZES = {"tiny": (4, 32, 2, 16), "large": (16, 72, 28, 32)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    heads, features, layers, pixels = SIZES[size]
    model = DiTTransformer2DModel(
        **{"num_attention_heads": heads, "attention_head_dim": features, "num_layers": layers},
        **{"in_channels": 4, "out_channels": 8, "sample_size": pixels, "patch_size": 2},
        **{"num_embeds_ada_norm": 10, "norm_elementwise_affine": False},
    ).eval()
    steps = torch.arange(batch) % 10
    inputs = {"hidden_states": torch.randn(batch, 4, pixels, pixels)}
    return model, {**inputs, "timestep": steps, "class_labels": steps}


def count(inputs: dict[str, Any]) -> int:
    """Return how many images there are in a call."""
    return len(inputs["hidden_states"])


if __name__ == "__main__":
    main(build)
