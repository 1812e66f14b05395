"""Hooks on tensors of a graph, whenever they are registered: they have the whole gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import ITS_OWN_WARNINGS, with_sites
from torch import Tensor

from fused_norm.models import output_parts

pytestmark = [
    *ITS_OWN_WARNINGS,
    # Elsewhere Dynamo breaks the graph there.
    pytest.mark.skipif(
        not find_spec("torch._higher_order_ops.register_hook"), reason="no hooks in graphs"
    ),
]

K, N = 32, 64
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(output_parts, "splits_outputs", lambda *_: True)
    monkeypatch.setattr(output_parts, "_FEWEST_FEATURES", 16)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def hook(t: Tensor) -> None:
    t.register_hook(lambda gradient: 3 * gradient + 1)


def of_a_copy(x, g, w, v):
    a = x.clone()
    y = F.linear(F.layer_norm(a, (K,), g), w)
    hook(a)
    return y, a.sin()


def of_a_result(x, g, w, v):
    z = F.layer_norm(x, (K,), g)
    y = F.linear(z, w)
    hook(z)
    return y, z.sin()


def of_a_result_between(x, g, w, v):
    z = F.layer_norm(x, (K,), g)
    y = F.linear(z, w)
    hook(z)
    return y, F.linear(z, v)


def of_a_sum(x, g, w, v):
    s = x + x.sin()
    y = F.linear(F.layer_norm(s, (K,), g), w)
    hook(s)
    return y, 2 * s


def of_modulated_rows(x, g, w, v):
    z = F.layer_norm(x, (K,)) * (1 + g)
    y = F.linear(z, w)
    hook(z)
    return y, z.sin()


def of_a_transposed_weight(x, g, w, v):
    u = w.t()
    y = F.layer_norm(x, (K,), g) @ u
    hook(u)
    return y, w.sum()


def of_gamma(x, g, w, v):
    h = 1 + g
    y = F.linear(F.rms_norm(x, (K,), None, 1e-5) * h, w)
    hook(h)
    return y, h.sum()


def of_one_of_two_equal_parts(x, g, w, v):
    y = F.linear(F.layer_norm(x, (K,), g), w)
    a, b, c = y[..., :16], y[..., 16:], y[..., 16:]
    hook(b)
    return tuple((t / 8) @ (t / 8).mT for t in (a, b, c))


def twice(x, g, w, v):
    a = x * 2
    z = F.layer_norm(a, (K,), g)
    hook(a)
    y = F.linear(z, w)
    a.register_hook(lambda gradient: gradient.sin())
    return y, a.sin()


ALONE: list[tuple[Function, int]] = [
    (of_a_copy, 1),
    (of_a_result, 0),
    (of_a_result_between, 0),
    (of_a_sum, 1),
    (of_modulated_rows, 0),
    (of_a_transposed_weight, 0),
    (of_gamma, 1),
    (of_one_of_two_equal_parts, 1),
    (twice, 1),
]


def returned(x, g, w, v):
    z = F.layer_norm(x, (K,), g)
    y = F.linear(z, w)
    hook(z)
    return y, z


def same_tensor(x, g, w, v):
    """`float` returns what it is given."""
    z = F.layer_norm(x, (K,), g)
    c = z.float()
    y = F.linear(c, w)
    hook(c)
    return y, z.sin()


def dropped(x, g, w, v):
    z = F.layer_norm(x, (K,), g)
    q = F.dropout(z, 0.0)
    hook(q)
    return F.linear(q, w), F.linear(z, v)


def written(x, g, w, v):
    a = x * 2
    y = F.linear(F.layer_norm(a, (K,), g), w).detach()
    hook(a)
    a.mul_(2)
    return y + x.sum(), a.sin()


NOT_ALONE = (returned, same_tensor, dropped, written)


def step(function: Function) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, K), (K,), (N, K), (N, K)]
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    results = function(*given)
    loss = sum((i + 1) * y.sin().sum() for i, y in enumerate(results))
    gradients = torch.autograd.grad(loss, given, allow_unused=True)
    return [*results, *[g for g in gradients if g is not None]]


def hold(function: Function) -> list[Any]:
    compiled, sites = with_sites(function, True, small=True)
    for found, expected in zip(step(compiled), step(function), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return sites


@pytest.mark.parametrize(("function", "fused"), ALONE, ids=lambda f: getattr(f, "__name__", f))
def test_whole_gradients(function: Function, fused: int) -> None:
    assert sum(site.fused for site in hold(function)) == fused


@pytest.mark.parametrize("function", NOT_ALONE, ids=lambda f: f.__name__)
def test_what_stays(function: Function) -> None:
    sites = hold(function)
    assert sites
    assert all("a hook is registered" in site.reason for site in sites)
