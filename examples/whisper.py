"""Whisper of transformers, two layers a side with random weights, with its seams fused."""

from __future__ import annotations

import sys

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration
from whole_model import compare


def main() -> int:
    """Run it; return 0 if all is the same as without."""
    torch.manual_seed(0)
    sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 512}
    config = WhisperConfig(
        vocab_size=1000,
        d_model=128,
        **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sides.items()},
        max_source_positions=100,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(config)
    sound = torch.randn(2, 80, 200)
    return compare(
        model, {"input_features": sound, "decoder_input_ids": torch.randint(3, 1000, (2, 16))}
    )


if __name__ == "__main__":
    sys.exit(main())
