"""A model of two small blocks, and steps of it with and without the backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SMALL = {"small": True}


class Block(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm1(x)).chunk(3, -1)
        x = x + self.out(torch.sigmoid(q) * k + v)
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False, count: int = 2) -> None:
        super().__init__()
        self.blocks, self.checkpoints = nn.ModuleList(Block() for _ in range(count)), checkpoints
        for p in self.parameters():
            nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def step(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    """Return the output and every gradient."""
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_alike(model: nn.Module, run: Any, shape: tuple[int, ...] = (2, 9, 32)) -> None:
    x = torch.randn(shape)
    for ours, own in zip(step(model, run, x), step(model, model, x), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
