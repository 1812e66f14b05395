"""A vision transformer of timm, two layers with random weights, with its seams fused."""

from __future__ import annotations

import sys

import timm
import torch
from whole_model import compare


def main() -> int:
    """Run it; return 0 if all is the same as without."""
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", embed_dim=192, depth=2, num_heads=3)
    return compare(model, {"x": torch.randn(2, 3, 224, 224)})


if __name__ == "__main__":
    sys.exit(main())
