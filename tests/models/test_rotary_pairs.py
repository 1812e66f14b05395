"""Queries and keys whose rotations by the same angles become one call, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import ITS_OWN_WARNINGS
from test_rotations import plain, sites, turned
from torch import Tensor

import fused_norm as fn
from fused_norm.models.rotations import _LEAST_ELEMENTS
from fused_norm.models.sites import Site

pytestmark = ITS_OWN_WARNINGS

Run = Callable[..., Any]


def heads_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return x * cos + turned(x) * sin


def one_after_the_other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The keys are made after the queries are rotated, and angles broadcast for each."""
    a = plain(q * 2, cos, sin)
    b = plain(k * 3, cos, sin)
    return a, b


def read_at_once(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The queries are read before the keys are rotated, but not before they are there."""
    q, k = q * 2, k * 3
    a = plain(q, cos, sin).tanh()
    return a, plain(k, cos, sin)


def heads_before_rows(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return heads_first(q, cos, sin), heads_first(k, cos, sin)


def with_norms(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    a, b = (F.rms_norm(x, (32,), w + 1, 1e-6) for x, w in ((q, cos[0] / 3), (k, sin[0] / 3)))
    return plain(a, cos, sin), plain(b, cos, sin)


def of_neighbors(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """With angles of pairs, repeated for each tensor."""

    def rotated(x: Tensor) -> Tensor:
        c, s = (v[:, None, :16].repeat_interleave(2, -1) for v in (cos, sin))
        two = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(3)
        return x * c + two * s

    return rotated(q), rotated(k)


def of_some_elements(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos[:, :16], sin[:, :16]
    return tuple(torch.cat((plain(x[..., :16], cos, sin), x[..., 16:]), -1) for x in (q, k))


def in_a_cache(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """As decoding does: the keys are written, then read with the queries."""
    cache = k.new_zeros(2, 9, 2, 32)
    a, b = plain(q, cos, sin), plain(k, cos, sin)
    cache.index_copy_(1, torch.arange(5), b)
    return a, cache


def of_one_row(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Heads before rows, and rows before heads: with one row, the angles broadcast to both."""
    q, k, c, s = q[:, :1].transpose(1, 2), k[:, :1], cos[:1, None], sin[:1, None]
    return q * c + turned(q) * s, k * c + turned(k) * s


def twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Two layers: each has a pair of its own."""
    a, b = plain(q, cos, sin), plain(k, cos, sin)
    c = a + b.mean()
    return plain(c, cos, sin), plain(b.sin(), cos, sin)


PAIRED = {
    run.__name__: run
    for run in (
        *(one_after_the_other, read_at_once, heads_before_rows, with_norms, of_neighbors),
        *(of_some_elements, in_a_cache, of_one_row, twice),
    )
}


def other_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return plain(q, cos, sin), plain(k, sin, cos)


def angles_of_other_rows(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return plain(q[:, :4], cos[:4], sin[:4]), plain(k[:, :4], cos[1:], sin[1:])


def of_another_form(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    two = torch.stack((-k[..., 1::2], k[..., ::2]), -1).flatten(3)
    return plain(q, cos, sin), k * c + two * s


def of_another_norm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    a, b = (F.rms_norm(x, (32,), None, eps) for x, eps in ((q, 1e-6), (k, 1e-2)))
    return plain(a, cos, sin), plain(b, cos, sin)


def of_a_norm_and_none(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return plain(q, cos, sin), plain(F.rms_norm(k, (32,), None, 1e-6), cos, sin)


def of_each_other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The second is made of the first."""
    a = plain(q, cos, sin)
    return a, plain(k + a[..., :2, :].tanh(), cos, sin)


def written_in_between(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """What both could read at the second is no longer what the first has read."""
    q = q * 1
    a = plain(q, cos, sin)
    q.mul_(2)
    return a, plain(k * 3, cos, sin), q


def written_before_the_second(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """What both could read at the first is not yet what the second will read."""
    k = k * 1
    a = plain(q, cos, sin).tanh()
    k.mul_(2)
    return a, plain(k, cos, sin)


def angles_written_in_between(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Two copies of the same tensor, which differ."""
    angles = cos * 1
    one = angles.clone().unsqueeze(-2)
    angles.mul_(2)
    two, s = angles.clone().unsqueeze(-2), sin.unsqueeze(-2)
    return q * one + turned(q) * s, k * two + turned(k) * s


def of_other_rows(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return plain(q, cos, sin), plain(k[:1], cos, sin)


def one_detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return plain(q, cos, sin), plain(k.detach(), cos, sin)


APART = {
    run.__name__: run
    for run in (
        *(other_angles, angles_of_other_rows, of_another_form, of_another_norm),
        *(of_a_norm_and_none, of_each_other, written_in_between, written_before_the_second),
        *(angles_written_in_between, of_other_rows),
    )
}


def inputs(follows: bool) -> list[Tensor]:
    torch.manual_seed(0)
    heads = [torch.randn(2, 5, n, 32).requires_grad_(follows) for n in (4, 2)]
    return [*heads, torch.randn(5, 32), torch.randn(5, 32)]


def given(run: Run, follows: bool) -> list[Tensor]:
    q, k, cos, sin = inputs(follows)
    if run is twice:
        k = torch.randn(2, 5, 4, 32).requires_grad_(follows)
    return [q, k, cos, sin]


def both(found: list[Site]) -> list[str]:
    return [site.calls[0] for site in found if site.fused and "both" in site.calls[0]]


def layout(y: Tensor) -> list[int]:
    """Return the strides; that of one row is any."""
    return [0 if size == 1 else stride for size, stride in zip(y.shape, y.stride(), strict=True)]


def assert_same(run: Run, arguments: list[Tensor], follows: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="fused_norm", options={"small": True, "then": "eager"})
    results, layouts = [], []
    for call in (compiled, run):
        ys = list(call(*arguments))
        layouts.append([(layout(y), y.requires_grad) for y in ys])
        if follows:
            total = sum(y.sin().sum() for y in ys if y.requires_grad)
            wanted = [t for t in arguments if t.requires_grad]
            ys += torch.autograd.grad(total, wanted, allow_unused=True)
        results.append(ys)
    assert layouts[0] == layouts[1]
    for mine, other in zip(*results, strict=True):
        if mine is None or other is None:
            assert mine is other
            continue
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("follows", [False, True])
def test_one_call_for_both(name: str, follows: bool) -> None:
    run = PAIRED[name]
    arguments = given(run, follows)
    with torch.set_grad_enabled(follows):
        found = sites(run, *arguments)
        assert all(site.fused for site in found)
        assert len(both(found)) == len(found) == (4 if run is twice else 2)
        assert_same(run, arguments, follows)


def test_what_a_pair_saves_is_what_its_rotations_save() -> None:
    """A launch is counted once, and each result where it is written."""
    arguments = inputs(False)
    paired = sites(one_after_the_other, *arguments)
    apart = sites(lambda q, k, c, s: (plain(q * 2, c, s), plain(k * 3, s, c)), *arguments)
    assert [site.ops_after for site in paired] == [1, 0]
    assert [site.ops_after for site in apart] == [1, 1]
    for one, other in zip(paired, apart, strict=True):
        assert one.bytes_saved == other.bytes_saved > 0
        assert one.ops_before == other.ops_before


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("follows", [False, True])
def test_two_calls_where_one_would_be_another(name: str, follows: bool) -> None:
    run = APART[name]
    arguments = given(run, follows)
    with torch.set_grad_enabled(follows):
        found = sites(run, *arguments)
        assert found
        assert not both(found)
        assert_same(run, arguments, follows)


def test_one_that_records_gradients_and_one_that_does_not() -> None:
    arguments = inputs(True)
    assert not both(sites(one_detached, *arguments))
    assert_same(one_detached, arguments, True)


def test_third_of_a_kind_is_alone() -> None:
    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return plain(q, cos, sin), plain(k, cos, sin), plain(q + 1, cos, sin)

    found = sites(run, *inputs(False))
    assert [site.calls for site in found] == [["rotary of both"]] * 2 + [["rotary"]]


def test_elements_of_both_count() -> None:
    """Whether a call is worth its start depends on all that it rotates."""
    rows = _LEAST_ELEMENTS // (6 * 32) + 1
    q, k = (torch.randn(1, rows, n, 32) for n in (4, 2))
    cos, sin = torch.randn(2, rows, 32)
    assert max(q.numel(), k.numel()) < _LEAST_ELEMENTS <= q.numel() + k.numel()
    found = sites(one_after_the_other, q, k, cos, sin, small=None)
    assert len(both(found)) == 2
    torch._dynamo.reset()
    found = sites(other_angles, q, k, cos, sin, small=None)
    assert not any(site.fused for site in found)
    assert all("a call this small" in site.reason for site in found)
    torch._dynamo.reset()
    less = (q[:, :-2], k[:, :-2], cos[:-2], sin[:-2])
    found = sites(one_after_the_other, *less, small=None)
    assert not any(site.fused for site in found)


def test_inductor_and_dynamic_shapes() -> None:
    for rows in (5, 9):
        q, k = (torch.randn(2, rows, n, 32) for n in (4, 2))
        cos, sin = torch.randn(2, rows, 32)
        expected = with_norms(q, k, cos, sin)
        nexts: list[dict[str, Any]] = [{"then": "eager"}, {}]
        for options in nexts:
            compiled = torch.compile(
                with_norms, backend="fused_norm", options=options | {"small": True}, dynamic=True
            )
            for mine, other in zip(compiled(q, k, cos, sin), expected, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


class _Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return heads_before_rows(q, k, cos, sin)


def test_exported_program() -> None:
    rows = _LEAST_ELEMENTS // (6 * 32) + 1
    q, k = (torch.randn(1, rows, n, 32) for n in (4, 2))
    cos, sin = torch.randn(2, rows, 32)
    program = torch.export.export(_Attention(), (q, k, cos, sin))
    optimized = fn.optimize(program)
    targets = [str(node.target) for node in optimized.graph.nodes]
    assert targets.count("fused_norm.rotary_of_both.default") == 1
    assert "fused_norm.rotary.default" not in targets
    found = optimized.module()(q, k, cos, sin)
    for mine, other in zip(found, _Attention()(q, k, cos, sin), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
