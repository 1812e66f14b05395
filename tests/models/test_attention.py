"""PyTorch's multi-head attention, written out so that its projection is fused: with any mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor, nn

LENGTH, BATCH, K, HEADS = 6, 2, 32, 4


class Attention(nn.Module):
    """A norm and PyTorch's module, or what the module calls."""

    def __init__(self, is_function: bool, batch_first: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.attention = nn.MultiheadAttention(K, HEADS, batch_first=batch_first)
        self.is_function = is_function

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        z, a = self.norm(x), self.attention
        if not self.is_function:
            y: Tensor = a(z, z, z, attn_mask=mask, is_causal=is_causal, need_weights=False)[0]
            return y
        y, _ = F.multi_head_attention_forward(
            *(z, z, z, K, HEADS, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0),
            *(a.out_proj.weight, a.out_proj.bias),
            need_weights=False,
            attn_mask=mask,
            is_causal=is_causal,
        )
        return y


def masks(name: str) -> Tensor:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    several = torch.rand(BATCH * HEADS, LENGTH, LENGTH) < 0.4
    several[..., 0] = False
    mask = {"2d": causal, "3d": several, "hint": causal}[name.split()[0]]
    return mask if name.endswith("bool") else mask * -3.0


@pytest.mark.parametrize("name", ["2d bool", "3d bool", "hint bool", "2d", "3d", "hint"])
@pytest.mark.parametrize("is_function", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_mask(name: str, is_function: bool, batch_first: bool) -> None:
    """A bool mask, which the function takes, made the pass give up the whole graph.

    What is told by the hint is_causal goes before the mask, as in PyTorch.
    """
    if is_function and batch_first:
        pytest.skip("the function takes rows of a length first")
    model: Any = Attention(is_function, batch_first)
    mask, is_causal = masks(name), name.startswith("hint")
    x = torch.randn(*((BATCH, LENGTH) if batch_first else (LENGTH, BATCH)), K)
    compiled, sites = with_sites(model)
    results = []
    for run in (model, compiled):
        rows = x.clone().requires_grad_()
        model.zero_grad()
        y = run(rows, mask, is_causal)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        results.append([y.detach(), rows.grad, *(p.grad for p in model.parameters())])
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    assert [site.fused for site in sites] == [True]
