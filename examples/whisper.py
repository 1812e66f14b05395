"""Whisper of transformers with random weights, with its norms fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration
from whole_model import main

UNIT = "frames"
# Width, layers of encoder and decoder, heads, frames, tokens; the large one is large-v3-turbo.
SIZES = {"tiny": (128, 2, 2, 4, 100, 16), "large": (1280, 32, 4, 20, 1500, 128)}


def build(size: str = "tiny", batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, and what it is called with."""
    width, encoder, decoder, heads, frames, tokens = SIZES[size]
    config = WhisperConfig(
        **{"d_model": width, "encoder_layers": encoder, "decoder_layers": decoder},
        **{f"{side}_attention_heads": heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")},
        **{"vocab_size": 1000, "max_source_positions": frames, "use_cache": False},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    )
    inputs = {"input_features": torch.randn(batch, config.num_mel_bins, 2 * frames)}
    inputs["decoder_input_ids"] = torch.randint(3, 1000, (batch, tokens))
    return WhisperForConditionalGeneration(config), inputs


def count(inputs: dict[str, Any]) -> int:
    """Return how many frames of sound there are in a call."""
    sound = inputs["input_features"]
    return int(sound.shape[0] * sound.shape[2])


if __name__ == "__main__":
    main(build)
