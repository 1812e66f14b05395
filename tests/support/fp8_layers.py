"""A transformer for FP8, of PyTorch's modules: pre-norms, attention, an MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from float8_models import K
from torch import Tensor, nn

BF16 = torch.bfloat16
HEADS = 8


class Layer(nn.Module):
    """A layer of a transformer: pre-norms, attention, and an MLP with GELU or with SwiGLU."""

    def __init__(self, gated: bool, K: int = K) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(K), norm(K)
        self.qkv = nn.Linear(K, 3 * K, bias=not gated)
        self.out = nn.Linear(K, K, bias=not gated)
        self.up, self.down = (nn.Linear(*size, bias=not gated) for size in ((K, 2 * K), (2 * K, K)))
        self.gate = nn.Linear(K, 2 * K, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        z = self.norm2(x)
        hidden = F.gelu(self.up(z)) if self.gate is None else F.silu(self.gate(z)) * self.up(z)
        y: Tensor = x + self.down(hidden)
        return y


def layers(gated: bool, K: int = K) -> nn.Sequential:
    """Return two layers and the last norm with a head."""
    torch.manual_seed(0)
    blocks = Layer(gated, K), Layer(gated, K)
    return nn.Sequential(*blocks, nn.LayerNorm(K), nn.Linear(K, 96)).to(BF16)


def rows(K: int = K) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 24, K).to(BF16)
