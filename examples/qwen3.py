"""Qwen3 of transformers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from whole_model import main

UNIT = "tokens"
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
# The large one is Qwen3 0.6B.
SIZES = {"tiny": (256, 768, 2, 4, 64), "large": (1024, 3072, 28, 16, 128)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    sizes = dict(zip(NAMES, SIZES[size], strict=True))
    sizes["num_key_value_heads"] = sizes["num_attention_heads"] // 2
    vocabulary, length = (1000, 64) if size == "tiny" else (151936, 2048)
    config = Qwen3Config(vocab_size=vocabulary, **sizes, use_cache=False, tie_word_embeddings=True)
    ids = torch.randint(vocabulary, (batch, length))
    return Qwen3ForCausalLM(config), {"input_ids": ids}


if __name__ == "__main__":
    main(build)
