"""A block whose layers others have in FP8, compiled, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import fused_norm as fn
from fused_norm.models import fuse

# Features of the layers that tests have in FP8 on a CPU.
K = 256
# Fewest that the library has in FP8.
WIDE = 1024


class Block(nn.Module):
    """Attention without heads and an MLP, with biases and without, after two kinds of norm."""

    def __init__(self, features: int = K) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(features), nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.out = nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(q * torch.sigmoid(k) + v)
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


class OneLayer(nn.Module):
    """A norm and a Linear layer."""

    def __init__(self, K: int = K, N: int = K) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(K), nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y


def compiled(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    torch.compiler.reset()
    options = {"then": "aot_eager", **options}
    run: Callable[[Tensor], Tensor] = torch.compile(model, backend="fused_norm", options=options)
    return run


def fused_graph(model: nn.Module, x: Tensor) -> Graph:
    """Return the graph of a model after the pass."""
    graphs: list[Graph] = []

    def kept(module: GraphModule, inputs: Any) -> Any:
        fuse.fuse(module, fuse.Options())
        graphs.append(module.graph)
        return module.forward

    torch.compiler.reset()
    torch.compile(model, backend=kept)(x)
    (graph,) = graphs
    return graph


def rows(dtype: torch.dtype = torch.bfloat16, features: int = K) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 24, features).to(dtype)


def decibels(found: Tensor, exact: Tensor) -> float:
    noise = (found.double() - exact.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))


def report(model: nn.Module, x: Tensor, **options: Any) -> dict[str, str]:
    """Return what is said of each site, by its path."""
    torch.compiler.reset()
    sites = fn.explain(model, x, options={"then": "eager", **options}).sites
    return {site.path: site.implementation if site.fused else site.reason for site in sites}
