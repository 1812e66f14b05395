"""What reads no more of normalized rows than their shape: it keeps its shape, dtype and layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor

K, N = 24, 40

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "rows": lambda z: z.view(-1, K),
    "one more dimension": lambda z: z[:, None],
    "transposed": lambda z: z.transpose(0, 1),
    "first": lambda z: z[0],
    "picked": lambda z: z[torch.tensor([2, 0])],
    "two": lambda z: z.reshape(-1, K).unsqueeze(0),
}
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "empty_like": lambda z: torch.empty_like(z).fill_(2),
    "new_zeros": lambda z: z.new_zeros(z.shape),
    "new_ones": lambda z: z.new_ones(3),
    "new_empty": lambda z: z.new_empty(z.size(0)).zero_(),
    "new_full": lambda z: z.new_full(z.size(), 3),
}


def sites_of(function: Callable[..., Any], *arguments: Any, dynamic: bool | None = None) -> Any:
    """Hold a function against itself compiled, layout included; return what became of its norms."""
    compiled, sites = with_sites(function, True, dynamic)
    for a, b in zip(function(*arguments), compiled(*arguments), strict=True):
        assert (b.dtype, b.shape, b.stride()) == (a.dtype, a.shape, a.stride())
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
    return sites


def cases() -> Iterator[Any]:
    """Give what is made, views and whether sizes are dynamic; every other case is slow."""
    for (i, made), (j, view), dynamic in itertools.product(
        enumerate(MADE), enumerate(VIEWS), (False, True)
    ):
        marks: Any = pytest.mark.slow if (i + j + dynamic) % 2 else ()
        name = f"{made}-{view}-{'dynamic' if dynamic else 'static'}"
        yield pytest.param(made, view, dynamic, marks=marks, id=name)


@pytest.mark.parametrize(("made", "view", "dynamic"), list(cases()))
def test_made_like_a_view(made: str, view: str, dynamic: bool) -> None:
    """It took the shape of what is normalized, or the graph did not run at all."""

    def function(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        rows = VIEWS[view](F.layer_norm(x + r, (K,)))
        return F.linear(rows, w), MADE[made](rows), MADE[made](VIEWS[view](x + r))

    x, r = torch.randn(3, 5, K), torch.randn(3, 5, K)
    (site,) = sites_of(function, x, r, torch.randn(N, K), dynamic=dynamic)
    assert site.fused, site.reason
    assert "return" not in site.calls[0]


def test_made_like_rows_of_another_dtype() -> None:
    """It took the dtype of what is normalized."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        rows = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return F.linear(rows.to(w.dtype), w), torch.zeros_like(rows), rows.new_ones(2)

    x, w = torch.randn(3, K).bfloat16(), torch.randn(N, K).bfloat16()
    compiled, _ = with_sites(function)
    assert [y.dtype for y in compiled(x, w)] == [y.dtype for y in function(x, w)]


def test_made_like_rows_of_another_layout() -> None:
    """It took the layout of what is normalized, and a view of it failed."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        rows = F.layer_norm(x.transpose(0, 1), (K,))
        return F.linear(rows, w), torch.zeros_like(rows).view(-1)

    (site,) = sites_of(function, torch.randn(3, 5, K), torch.randn(N, K))
    assert site.fused, site.reason


def test_experts_of_mixtral() -> None:
    """Its block's experts collect what they return in zeros that are like a view of the rows.

    Each expert sees all rows here, as an export of it does, so that one graph holds the block.
    """
    transformers = pytest.importorskip("transformers", reason="uv sync --group models")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def every_expert(self: Any, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        gates, ups = torch.matmul(rows, self.gate_up_proj.mT).chunk(2, dim=-1)
        for expert, y in enumerate(torch.matmul(self.act_fn(gates) * ups, self.down_proj.mT)):
            total += y * (weights * (index == expert)).sum(-1, keepdim=True)
        return total

    with mock.patch.dict(ALL_EXPERTS_FUNCTIONS._local_mapping, {"every": every_expert}):
        config = transformers.MixtralConfig(
            **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
            **{"num_local_experts": 4, "num_experts_per_tok": 2},
            experts_implementation="every",
        )
        model = transformers.MixtralForCausalLM(config).eval()
        ids = torch.randint(3, 97, (2, 5))
        with torch.no_grad():
            sites = sites_of(lambda ids: (model(input_ids=ids, use_cache=False).logits,), ids)
    assert [site.reason for site in sites if site.linears] == [""] * 3
