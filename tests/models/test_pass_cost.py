"""What the pass costs grows with a graph's nodes, and no faster: calls of functions are counted."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fused_norm.models.fuse import Options, fuse

K, V = 32, 103


class Block(nn.Module):
    """A layer of a language model; one that writes keeps its rows, and adds to them in place."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.norms = nn.ModuleList(nn.RMSNorm(K) for _ in range(2))
        self.qkv, self.out = nn.Linear(K, 3 * K), nn.Linear(K, K)
        self.gate, self.up, self.down = nn.Linear(K, 48), nn.Linear(K, 48), nn.Linear(48, K)
        self.register_buffer("kept", torch.zeros(2, 9, K))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(2, 9, 4, 8).transpose(1, 2) for part in parts)
        q, k = (t * cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.added(x, self.out(mixed.transpose(1, 2).reshape(2, 9, K)))
        rows = self.norms[1](x)
        return self.added(x, self.down(F.silu(self.gate(rows)) * self.up(rows)))

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        if self.writes:
            self.kept.copy_(y.detach())
            x += y
            return x
        return x + y


class Model(nn.Module):
    """Layers, a norm, and a head with its loss."""

    def __init__(self, layers: int, writes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(writes) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(K), nn.Linear(K, V, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, labels: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, V), labels.view(-1))


def calls_per_node(layers: int, writes: bool) -> tuple[float, Counter[str]]:
    """Return how many functions of the pass run for each node of a graph, and what is fused."""
    found: list[tuple[float, Counter[str]]] = []

    def counting(module: GraphModule, _: Any) -> Any:
        calls, nodes = 0, len(module.graph.nodes)

        def count(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call" and "fused_norm/models/" in frame.f_code.co_filename

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            sites = fuse(module, Options(small=True))
        finally:
            sys.setprofile(before)
        found.append((calls / nodes, Counter(site.kind for site in sites if site.fused)))
        return module.forward

    torch.compiler.reset()
    angles, labels = torch.randn(2, 9, 8), torch.zeros(2, 9, dtype=torch.int64)
    model = Model(layers, writes)
    torch.compile(model, backend=counting)(torch.randn(2, 9, K), *angles, labels)
    (only,) = found
    return only


@pytest.mark.parametrize("writes", [False, True])
def test_a_node_costs_as_much_in_a_graph_of_four_times_the_layers(writes: bool) -> None:
    few, _ = calls_per_node(2, writes)
    many, fused = calls_per_node(8, writes)
    assert fused["head"] == 1
    assert fused["rms_norm"] == (0 if writes else 16)
    assert few > 10
    assert many < 1.1 * few
