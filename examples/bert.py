"""BERT of transformers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from whole_model import main

UNIT = "tokens"
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The large one is BERT large.
SIZES = {"tiny": (256, 1024, 2, 4), "large": (1024, 4096, 24, 16)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    sizes = dict(zip(NAMES, SIZES[size], strict=True))
    vocabulary, length = (1000, 64) if size == "tiny" else (30522, 512)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=vocabulary, **sizes, **dropout)
    ids = torch.randint(vocabulary, (batch, length))
    return BertForMaskedLM(config), {"input_ids": ids}


if __name__ == "__main__":
    main(build)
