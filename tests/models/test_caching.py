"""PyTorch's cache of compiled graphs: a second start uses our entries, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import fused_norm as fn
from fused_norm.models import caching

OPTIONS = {"small": True}


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    with fresh_cache():
        yield
    torch.compiler.reset()


class Model(nn.Module):
    """A block whose calls are in the graph itself, or in the body of a checkpoint."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            found: Tensor = checkpoint(self.block, x, use_reentrant=False)
            return found
        return self.block(x)


def start(model: nn.Module, x: Tensor, mode: Any = None) -> tuple[str, list[Tensor]]:
    """Compile as a new process does; return whether PyTorch's cache had it, and all results."""
    torch.compiler.reset()
    counters.clear()
    with nullcontext() if mode is None else mode:
        y = torch.compile(model, backend="fused_norm", options=OPTIONS)(x)
        results = [y.detach(), *torch.autograd.grad(y.sum(), list(model.parameters()))]
    found = [key for key in counters["aot_autograd"] if key.startswith("autograd_cache_")]
    (word,) = {key.rpartition("_")[2] for key in found} - {"saved"}
    return word, results


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_second_start_finds_the_compiled_graphs(is_checkpointed: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(is_checkpointed), torch.randn(64, 32)
    first, results = start(model, x)
    second, again = start(model, x)
    assert (first, second) == ("miss", "hit")
    torch.testing.assert_close(again, results, rtol=0, atol=0)
    y = model(x)
    exact = [y.detach(), *torch.autograd.grad(y.sum(), list(model.parameters()))]
    torch.testing.assert_close(results, exact)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_mode_or_other_sources_find_none(
    is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Model(is_checkpointed), torch.randn(64, 32)
    assert start(model, x)[0] == "miss"
    assert start(model, x, fn.batch_invariant())[0] == "miss"
    monkeypatch.setattr(caching, "_sources", lambda: "of another version")
    assert start(model, x)[0] == "miss"
    assert start(model, x)[0] == "hit"


def test_keys_tell_dtypes_of_autocast_apart() -> None:
    keys = {caching._key({"cpu"})}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.add(caching._key({"cpu"}))
    assert len(keys) == 3


def test_a_function_that_has_no_name_is_not_kept_but_keyed() -> None:
    """PyTorch refuses it in a graph, and does not look into a checkpoint's body."""

    def nameless(x: Tensor) -> Tensor:
        return x

    nameless.__module__ = "fused_norm.head"
    graph = torch.fx.Graph()
    graph.call_function(nameless, (graph.placeholder("x"),))
    assert list(caching.with_keys({}, graph.nodes, [])[caching.OPTION]) == ["fused_norm"]
