"""LLaMA of transformers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from whole_model import main

UNIT = "tokens"
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The large one is LLaMA 3.2 1B.
SIZES = {"tiny": (256, 704, 2, 8), "large": (2048, 8192, 16, 32)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    sizes = dict(zip(NAMES, SIZES[size], strict=True))
    heads = sizes["num_attention_heads"] // 4
    vocabulary, length = (1000, 64) if size == "tiny" else (128256, 2048)
    config = LlamaConfig(vocab_size=vocabulary, **sizes, num_key_value_heads=heads, use_cache=False)
    ids = torch.randint(vocabulary, (batch, length))
    return LlamaForCausalLM(config), {"input_ids": ids}


if __name__ == "__main__":
    main(build)
