"""ModernBERT of transformers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import ModernBertConfig, ModernBertForMaskedLM
from whole_model import main

UNIT = "tokens"
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The large one is ModernBERT large.
SIZES = {"tiny": (256, 512, 2, 4), "large": (1024, 2624, 28, 16)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    sizes = dict(zip(NAMES, SIZES[size], strict=True))
    vocabulary, length = (1000, 64) if size == "tiny" else (50368, 1024)
    special = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    config = ModernBertConfig(vocab_size=vocabulary, **sizes, **special)
    config._attn_implementation = "sdpa"
    ids = torch.randint(len(special), vocabulary, (batch, length))
    return ModernBertForMaskedLM(config), {"input_ids": ids}


if __name__ == "__main__":
    main(build)
