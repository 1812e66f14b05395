"""Keys and values that the call which rotates the keys writes to a cache, and those it leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import ITS_OWN_WARNINGS
from test_rotary_pairs import of_neighbors, with_norms
from test_rotations import model_of, plain, sites
from torch import Tensor

import fused_norm as fn
from fused_norm.models.sites import ROTARY

pytestmark = ITS_OWN_WARNINGS
transformers = pytest.importorskip("transformers")

S, T, H, D = 9, 2, 2, 32
INTO_CACHES = ", into caches"


def inputs(tokens: int = T) -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, tokens, n * D) for n in (4, H, H))
    cos, sin = torch.randn(2, tokens, D)
    keys, values = torch.randn(2, 3, H, S, D).unbind()
    # Each in memory of its own.
    keys, values = keys.clone(), values.clone()
    slots = torch.tensor([7, 2, 5, 0])[:tokens]
    return {
        **{"q": q, "k": k, "v": v, "cos": cos, "sin": sin},
        **{"keys": keys, "values": values, "slots": slots},
    }


def rotated(t: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, rotated, and values, with heads before rows."""
    q, k, v = (t[name].unflatten(-1, (-1, D)) for name in ("q", "k", "v"))
    q, k = (plain(x, t["cos"], t["sin"]).transpose(1, 2) for x in (q, k))
    return q, k, v.transpose(1, 2)


def attended(q: Tensor, t: dict[str, Tensor]) -> Tensor:
    k, v = (t[name].repeat_interleave(2, 1) for name in ("keys", "values"))
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


def as_static_cache(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t)


def slots_made_between(t: dict[str, Tensor]) -> Tensor:
    """As transformers counts, in place."""
    q, k, v = rotated(t)
    length = t["slots"][:1]
    slots = torch.arange(T) + length - length
    length.add_(T)
    t["keys"].index_copy_(-2, slots, k)
    t["values"].index_copy_(-2, slots, v)
    return attended(q, t)


def results_of_writes_read(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    keys = t["keys"].index_copy_(2, t["slots"], k)
    values = t["values"].index_copy_(2, t["slots"], v)
    return attended(q, {"keys": keys, "values": values})


def with_norms_of_heads(t: dict[str, Tensor]) -> Tensor:
    q, k, v = (t[name].unflatten(-1, (-1, D)) for name in ("q", "k", "v"))
    q, k = with_norms(q, k, t["cos"], t["sin"])
    t["keys"].index_copy_(2, t["slots"], k.transpose(1, 2))
    t["values"].index_copy_(2, t["slots"], v.transpose(1, 2))
    return attended(q.transpose(1, 2), t)


def of_pairs(t: dict[str, Tensor]) -> Tensor:
    q, k, v = (t[name].unflatten(-1, (-1, D)) for name in ("q", "k", "v"))
    q, k = of_neighbors(q, k, t["cos"], t["sin"])
    t["keys"].index_copy_(2, t["slots"], k.transpose(1, 2))
    t["values"].index_copy_(2, t["slots"], v.transpose(1, 2))
    return attended(q.transpose(1, 2), t)


def one_token(t: dict[str, Tensor]) -> Tensor:
    """As decoding does."""
    first = {name: t[name][:, :1] for name in ("q", "k", "v")}
    q, k, v = rotated(t | first | {name: t[name][:1] for name in ("cos", "sin")})
    slots = t["slots"][:1]
    t["keys"].index_copy_(2, slots, k)
    t["values"].index_copy_(2, slots, v)
    return attended(q, t)


STORED = {
    run.__name__: run
    for run in (
        *(as_static_cache, slots_made_between, results_of_writes_read, with_norms_of_heads),
        *(of_pairs, one_token),
    )
}


def other_slots(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"] + 1, v)
    return attended(q, t)


def one_cache(t: dict[str, Tensor]) -> Tensor:
    """The values replace the keys."""
    q, k, v = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    t["keys"].index_copy_(2, t["slots"], v)
    return attended(q, t)


def caches_that_overlap(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    keys, values = t["keys"][:, :, :-1], t["keys"][:, :, 1:]
    keys.index_copy_(2, t["slots"], k)
    values.index_copy_(2, t["slots"], v)
    return attended(q, t)


def read_between(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    before = t["values"].sum()
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t) + before


def values_of_the_keys_cache(t: dict[str, Tensor]) -> Tensor:
    """The values are read from where the keys go."""
    q, k, _ = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"], t["keys"][:, :, 1 : T + 1])
    return attended(q, t)


def keys_that_others_read(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t) + k.sum()


def queries_read_before(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    scale = q.sum()
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t) * scale


def angles_written_between(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    t["cos"].mul_(2)
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t)


def heads_written_between(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    t["k"].add_(1)
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t)


def tokens_before_heads(t: dict[str, Tensor]) -> Tensor:
    """A cache of another order: tokens are its second dimension."""
    q, k, v = rotated(t)
    keys, values = (t[name].transpose(1, 2).contiguous() for name in ("keys", "values"))
    keys.index_copy_(1, t["slots"], k.transpose(1, 2))
    values.index_copy_(1, t["slots"], v.transpose(1, 2))
    return attended(q, {"keys": keys.transpose(1, 2), "values": values.transpose(1, 2)})


def keys_multiplied(t: dict[str, Tensor]) -> Tensor:
    """One token of one head has the same shape in both orders."""
    q, k, v = (t[name][:, :1, :D].unflatten(-1, (-1, D)) for name in ("q", "k", "v"))
    q, k = (plain(x, t["cos"][:1], t["sin"][:1]) for x in (q, k))
    keys, values, slots = t["keys"][:, :1], t["values"][:, :1], t["slots"][:1]
    v = v.transpose(1, 2)
    keys.index_copy_(2, slots, k * 3)
    values.index_copy_(2, slots, v)
    return q + keys.sum()


def keys_gathered_between(t: dict[str, Tensor]) -> Tensor:
    """What the first write wrote is copied before the second one."""
    q, k, v = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    copied = t["keys"][:, :, t["slots"]]
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t) + copied.sum()


def keys_gathered_as_values(t: dict[str, Tensor]) -> Tensor:
    q, k, _ = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    t["values"].index_copy_(2, t["slots"], t["keys"][:, :, t["slots"]])
    return attended(q, t)


def keys_reshaped_between(t: dict[str, Tensor]) -> Tensor:
    q, k, v = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    copied = t["keys"].transpose(1, 2).reshape(3, -1)
    t["values"].index_copy_(2, t["slots"], v)
    return attended(q, t) + copied.sum()


def keys_alone(t: dict[str, Tensor]) -> Tensor:
    q, k, _ = rotated(t)
    t["keys"].index_copy_(2, t["slots"], k)
    return attended(q, t)


LEFT = {
    run.__name__: run
    for run in (
        *(other_slots, one_cache, caches_that_overlap, read_between, values_of_the_keys_cache),
        *(keys_that_others_read, queries_read_before, angles_written_between),
        *(heads_written_between, tokens_before_heads, keys_alone, keys_multiplied),
        *(keys_gathered_between, keys_gathered_as_values, keys_reshaped_between),
    )
}


def calls(run: Callable[..., Any], t: dict[str, Tensor]) -> list[str]:
    return [call for site in sites(run, copy.deepcopy(t)) for call in site.calls]


def assert_same(run: Callable[..., Any], given: dict[str, Tensor], **options: Any) -> None:
    """Hold the result, and every tensor that was given, to those of the plain function."""
    torch._dynamo.reset()
    compiled = torch.compile(
        run, backend="fused_norm", options={"small": True} | options, fullgraph=True
    )
    mine, other = copy.deepcopy(given), copy.deepcopy(given)
    for _ in range(2):
        torch.testing.assert_close(compiled(mine), run(other), rtol=1e-4, atol=1e-5)
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", STORED)
@torch.no_grad()
def test_written_by_one_call(name: str) -> None:
    found = calls(STORED[name], inputs())
    assert len(found) == 2
    assert all(call.endswith(INTO_CACHES) for call in found)
    assert_same(STORED[name], inputs(), then="eager")
    assert_same(STORED[name], inputs())


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_written_as_they_were(name: str) -> None:
    found = calls(LEFT[name], inputs())
    assert len(found) == 2
    assert not any(call.endswith(INTO_CACHES) for call in found)
    assert_same(LEFT[name], inputs(), then="eager")
    assert_same(LEFT[name], inputs())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_leave_the_writes(name: str) -> None:
    t = inputs()
    t[name].requires_grad_()
    assert not any(call.endswith(INTO_CACHES) for call in calls(as_static_cache, t))
    with torch.no_grad():
        assert all(call.endswith(INTO_CACHES) for call in calls(as_static_cache, inputs()))


@torch.no_grad()
def test_what_the_report_says() -> None:
    """Two ops fewer than where keys are rotated alone, and the keys written once."""
    one, other = (sites(run, inputs()) for run in (as_static_cache, keys_that_others_read))
    assert sum(site.ops_before for site in one) == sum(site.ops_before for site in other) + 2
    assert sum(site.ops_after for site in one) == sum(site.ops_after for site in other) == 1
    keys = 3 * T * H * D * 4
    assert sum(s.bytes_saved for s in one) == sum(s.bytes_saved for s in other) + keys


@torch.no_grad()
def test_nothing_copies_a_cache() -> None:
    """Inductor writes the caches in place, too."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    compiled = torch.compile(as_static_cache, backend="fused_norm", options={"small": True})
    _, code = run_and_get_code(compiled, inputs())
    assert "fused_norm.rotary_into_caches.default(" in code[0]
    assert "copy_" not in code[0].partition("def call")[2]


@torch.no_grad()
def test_dynamic_shapes() -> None:
    compiled = torch.compile(
        as_static_cache,
        backend="fused_norm",
        options={"small": True, "then": "eager"},
        dynamic=True,
    )
    for tokens in (2, 3, 4):
        mine, other = inputs(tokens), inputs(tokens)
        torch.testing.assert_close(compiled(mine), as_static_cache(other), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine["keys"], other["keys"])


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
@torch.no_grad()
def test_static_cache_of_transformers(name: str) -> None:
    model = model_of(name).eval()
    ids = torch.arange(14).reshape(2, 7)

    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    model(ids, cache=cache)
    report = fn.explain(model, ids[:, :1], options={"small": True}, cache=cache)
    found = [call for site in report.sites if site.kind == ROTARY for call in site.calls]
    assert [call.endswith(INTO_CACHES) for call in found] == [True, True]

    def decoded(run: Callable[..., Any]) -> list[Tensor]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
        found = [model(ids, cache=cache).logits]
        for step in range(3):
            found.append(run(ids[:, step : step + 1], cache=cache).logits)
        return [*found, *(v for layer in cache.layers for v in (layer.keys, layer.values))]

    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend="fused_norm", options={"small": True, "then": "eager"}, fullgraph=True
    )
    for mine, other in zip(decoded(compiled), decoded(model), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
