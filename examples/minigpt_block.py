"""A block of a GPT on fused_norm: LayerNorm and attention, LayerNorm and MLP, two residuals.

The task, its sizes and its tolerances are those of KernelBench's level 3, problem 44
(https://github.com/ScalingIntelligence/KernelBench, MIT), which has the block from minGPT
(https://github.com/karpathy/minGPT, MIT). The code here is our own: `Plain` spells the mathematics
out, attention included, as the task does; `Sdpa` differs by PyTorch's own attention and GELU alone;
`Fused` takes those and has our ops throughout. What fused_norm gains is the last against `Sdpa`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from side_by_side import Block, main
from torch import Tensor, nn

import fused_norm as fn

WIDTH, HEADS, LONGEST = 768, 8, 1024
# Batch and length of the sequences: the task's, fewer for a CPU, and for a look.
SIZES = {"cuda": (32, 512), "cpu": (2, 512), "quick": (2, 64)}
# KernelBench's.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


class Plain(nn.Module):
    """The block as formulas.

    Args:
        width: Features of a token.
        heads: Heads of the attention.
        longest: Tokens of a sequence at most.
    """

    past: Tensor

    def __init__(self, width: int = WIDTH, heads: int = HEADS, longest: int = LONGEST) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("past", torch.ones(longest, longest, dtype=torch.bool).tril())

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what each token takes from those up to it."""
        length, size = q.shape[-2:]
        scores = q @ k.mT / math.sqrt(size)
        scores = scores.masked_fill(~self.past[:length, :length], float("-inf"))
        return torch.softmax(scores, -1) @ v

    def gelu(self, h: Tensor) -> Tensor:
        """Return GELU by its tanh."""
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))

    def mix(self, qkv: Tensor) -> Tensor:
        """Return what all heads return, side by side as `from_heads` takes it."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        return self.attention(q, k, v).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, width]` for an input of that shape."""
        x = x + self.from_heads(self.mix(self.to_qkv(self.attention_norm(x))))
        y: Tensor = self.down(self.gelu(self.up(self.mlp_norm(x))))
        return x + y


class Sdpa(Plain):
    """The same with PyTorch's attention and GELU."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what each token takes from those up to it."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gelu(self, h: Tensor) -> Tensor:
        """Return GELU by its tanh."""
        return F.gelu(h, approximate="tanh")


class Fused(Sdpa):
    """The same with an op for each part: norm and Linear; Linear, residual and statistics; MLP."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, tokens, width]` for an input of that shape."""
        norm, to_qkv, from_heads = self.attention_norm, self.to_qkv, self.from_heads
        qkv = fn.norm_linear(
            x,
            to_qkv.weight,
            to_qkv.bias,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
        )
        norm, up, down = self.mlp_norm, self.up, self.down
        # The statistics of the sum are found while it is written.
        x, statistics = fn.linear_add(
            self.mix(qkv), from_heads.weight, from_heads.bias, x, eps=norm.eps
        )
        y: Tensor = fn.norm_mlp(
            x,
            *(up.weight, up.bias, down.weight, down.bias),
            activation="gelu_tanh",
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
            statistics=statistics,
            residual_out=x,
        )
        return y


def block(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Block:
    """Return the block in its three versions, of one set of parameters, and a random input.

    Args:
        sizes: Batch and length.
        device: Where.
        dtype: Of everything.
    """
    torch.manual_seed(0)
    plain = Plain().to(device, dtype)
    versions: dict[str, Callable[..., Tensor]] = {"formulas": plain}
    for name, kind in (("PyTorch's attention", Sdpa), ("fused_norm", Fused)):
        version = kind().to(device, dtype)
        for own, module in plain.named_children():
            setattr(version, own, module)
        versions[name] = version
    x = torch.rand(*sizes, WIDTH, device=device, dtype=dtype)
    name = f"{sizes[0]} x {sizes[1]} x {WIDTH}, {str(dtype).removeprefix('torch.')}"
    return Block(name, [x], versions, list(plain.parameters()), TOLERANCES[dtype])


def blocks(device: torch.device, quick: bool) -> list[Callable[[], Block]]:
    """Return makers of all blocks for a device: in float32, on GPUs in bfloat16 too.

    Args:
        device: Where.
        quick: Whether to have small ones.
    """
    sizes = SIZES["quick" if quick else device.type]
    dtypes = list(TOLERANCES)[: 2 if device.type == "cuda" else 1]
    return [partial(block, sizes, device, dtype) for dtype in dtypes]


if __name__ == "__main__":
    sys.exit(main("GPT block", blocks))
