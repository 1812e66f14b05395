"""Keys and values that are repeated for the heads of queries: attention reads them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import fused_norm as fn
from fused_norm.models.fuse import Options, fuse

BATCH, HEADS, TIMES, LENGTH, FEATURES = 2, 3, 2, 5, 8
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def repeated(x: Tensor) -> Tensor:
    """Repeat heads as transformers does."""
    B, H, L, D = x.shape
    return x[:, :, None, :, :].expand(B, H, TIMES, L, D).reshape(B, H * TIMES, L, D)


def by_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)


def by_unsqueeze(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.unsqueeze(2).expand(-1, -1, TIMES, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def with_a_known_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(q.shape[-2], device=q.device)
    mask = rows[:, None] >= rows[None, :]
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


def of_one_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = repeated(k)
    return F.scaled_dot_product_attention(q, both, both)


def read_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = repeated(k)
    return F.scaled_dot_product_attention(q, keys, repeated(v)) + keys.mean()


def with_another_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = q[:, :, :, :1] > 0
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


def in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads, then all again: another head for each of the queries'."""
    B, H, L, D = k.shape
    k, v = (x[:, None].expand(B, TIMES, H, L, D).reshape(B, H * TIMES, L, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def keys_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeated(k), torch.cat([v, v], 1))


def changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeated(k) * 2, repeated(v))


def written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * 1
    keys = repeated(k)
    k.mul_(3)
    return F.scaled_dot_product_attention(q, keys, repeated(v)) + k.mean()


def written_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = repeated(k)
    keys[:, 1] = 0
    return F.scaled_dot_product_attention(q, keys, repeated(v))


def written_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A backward that reads what attention read needs it as it was."""
    k = k * 1
    y = F.scaled_dot_product_attention(q, repeated(k), repeated(v))
    k.mul_(3)
    return y + k.mean()


def without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        keys = repeated(k)
    return F.scaled_dot_product_attention(q, keys, repeated(v))


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    heads = (HEADS * TIMES, HEADS, HEADS)
    return [torch.randn(BATCH, H, LENGTH, FEATURES).requires_grad_() for H in heads]


def step(function: Any, inputs: list[Tensor]) -> list[Tensor | None]:
    y = function(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad(y, inputs, dy, allow_unused=True)]


def compiled(call: Call, inputs: list[Tensor]) -> tuple[list[Tensor | None], int]:
    """Return what a compiled step gives, and how many nodes of its graph are left."""
    heads: list[int] = []

    def backend(module: GraphModule, _: Any) -> Any:
        failures: list[str] = []
        fuse(module, Options(), failures)
        assert not failures
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                key: Any = node.args[1]
                heads.append(key.meta["example_value"].shape[1])
                assert bool(node.kwargs.get("enable_gqa")) == (heads[-1] == HEADS)
        return module.forward

    torch.compiler.reset()
    return step(torch.compile(call, backend=backend), inputs), heads[0]


@pytest.mark.parametrize(
    "call", [by_transformers, by_unsqueeze, with_a_known_mask, of_one_tensor, read_again]
)
def test_repeated_heads_are_read_as_they_are(call: Call) -> None:
    found, heads = compiled(call, tensors())
    assert heads == HEADS
    torch.testing.assert_close(found, step(call, tensors()))


@pytest.mark.parametrize(
    "call",
    [
        *(with_another_mask, in_turn, keys_alone, changed, without_gradients),
        *(written_between, written_after, written_later),
    ],
)
def test_all_others_stay(call: Call) -> None:
    found, heads = compiled(call, tensors())
    assert heads == HEADS * TIMES
    torch.testing.assert_close(found, step(call, tensors()))


def test_explain_says_how_attention_is_called() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return with_a_known_mask(q, k, v)

    report = fn.explain(Model(), *tensors())
    (site,) = report.sites
    assert (site.kind, site.fused, site.shape) == ("attention", True, ("2", "6", "5", "8"))
    assert site.calls == ["is_causal, keys and values of fewer heads"]
    assert "1 attention without a mask" in report.summary()


def test_long_heads_and_other_features_stay() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v))

    for sizes in ((264, 264), (FEATURES, 2 * FEATURES)):
        D, width = sizes
        inputs = [torch.randn(1, HEADS * TIMES, 2, D), torch.randn(1, HEADS, 2, D)]
        inputs = [t.requires_grad_() for t in (*inputs, torch.randn(1, HEADS, 2, width))]
        found, heads = compiled(call, inputs)
        assert heads == HEADS * TIMES
        torch.testing.assert_close(found, step(call, inputs))
