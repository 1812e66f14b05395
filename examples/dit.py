"""A diffusion transformer of diffusers, two layers with random weights, with its seams fused."""

from __future__ import annotations

import sys

import torch
from diffusers import DiTTransformer2DModel
from whole_model import compare


def main() -> int:
    """Run it; return 0 if all is the same as without."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_elementwise_affine=False,
    ).eval()
    steps = torch.tensor([1, 2])
    image = torch.randn(2, 4, 16, 16)
    return compare(model, {"hidden_states": image, "timestep": steps, "class_labels": steps})


if __name__ == "__main__":
    sys.exit(main())
