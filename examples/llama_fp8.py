"""LLaMA of transformers in FP8: a few steps of training next to bfloat16, then inference.

On Hopper the products run in FP8. Elsewhere PyTorch's ops compute the same numbers, slowly.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fused_norm as fn
from fused_norm.models import backend

STEPS = 5
# Layers of fewer than 1024 features or outputs stay in bfloat16 unless they are asked for.
SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16}
OPTIONS: dict[str, Any] = {"fp8": "rowwise", "skip": ["lm_head"], "then": "eager"}
# How far losses may be from those in bfloat16, and how near logits are to theirs.
MOST, LEAST_DECIBELS = 0.1, 20.0


def build() -> tuple[nn.Module, Tensor]:
    """Return the model in bfloat16, and a batch of tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1000, **SIZES, **HEADS, use_cache=False)
    model: Any = LlamaForCausalLM(config)
    return model.to(device, torch.bfloat16), torch.randint(1000, (2, 32), device=device)


def train(model: nn.Module, run: Any, ids: Tensor) -> list[float]:
    """Return the losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(STEPS):
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def decibels(found: Tensor, expected: Tensor) -> float:
    """Return the signal-to-noise ratio."""
    noise = (found.float() - expected.float()).square().sum()
    return float(10 * torch.log10(expected.float().square().sum() / noise))


def main() -> int:
    """Train and infer; return 0 if FP8 stays near to bfloat16."""
    model, ids = build()
    twin = copy.deepcopy(model)
    print(fn.explain(twin, input_ids=ids, options=OPTIONS))
    # Where the package is installed: backend="fused_norm".
    compiled = torch.compile(twin, backend=backend, options=OPTIONS)
    expected, losses = train(model, model, ids), train(twin, compiled, ids)
    for step, (one, other) in enumerate(zip(expected, losses, strict=True), 1):
        print(f"step {step}: loss {one:.3f} in bfloat16, {other:.3f} in FP8")
    # From here on weights are quantized once.
    fn.freeze(twin.eval())
    with torch.no_grad():
        ratio = decibels(compiled(input_ids=ids).logits, twin(input_ids=ids).logits)
    print(f"logits in FP8, of those in bfloat16: {ratio:.1f} dB")
    worst = max(abs(b - a) for a, b in zip(expected, losses, strict=True))
    return 0 if worst < MOST and ratio > LEAST_DECIBELS else 1


if __name__ == "__main__":
    sys.exit(main())
