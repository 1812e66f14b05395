"""GPT-2 of transformers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from whole_model import main

UNIT = "tokens"
# The large one is GPT-2 XL.
SIZES = {"tiny": (256, 2, 4), "large": (1600, 48, 25)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    sizes = dict(zip(("n_embd", "n_layer", "n_head"), SIZES[size], strict=True))
    vocabulary, length = (1000, 64) if size == "tiny" else (50257, 1024)
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, **sizes, **dropout, use_cache=False
    )
    ids = torch.randint(vocabulary, (batch, length))
    return GPT2LMHeadModel(config), {"input_ids": ids}


if __name__ == "__main__":
    main(build)
