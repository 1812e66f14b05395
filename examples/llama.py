"""LLaMA of transformers, two layers with random weights, with its seams fused."""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from whole_model import compare


def main() -> int:
    """Run it; return 0 if all is the same as without."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    return compare(model, {"input_ids": torch.randint(1000, (2, 64))})


if __name__ == "__main__":
    sys.exit(main())
