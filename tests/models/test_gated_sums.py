"""Residual sums of gated layers, as in adaLN-Zero: what products compute, and what stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from patterns import K, parameters
from torch import Tensor

from fused_norm.models.sites import RESIDUAL
from fused_norm.ops.operands import hint

Function = Callable[..., Tensor]
# What a tile of Hopper's kernels has of rows, here.
_TILE = 5


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose products add, with a gate for each tile of rows or a number of them."""

    def adds(x: Tensor, weight: Tensor, groups: int = 0) -> bool:
        rows = math.prod(map(hint, x.shape[:-1]))
        return groups <= 1 or rows % (groups * _TILE) == 0

    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", adds)


def sites_of(function: Function, names: str, follows: str = "", **options: Any) -> list[Any]:
    """Hold a function of some parameters against itself compiled; some may have gradients."""
    p = parameters() | {"m": torch.randn(2, 6 * K)}
    given = [p[name].detach().requires_grad_(name in follows) for name in names]
    compiled, sites = with_sites(function, True, **options)
    with torch.set_grad_enabled(bool(follows)):
        torch.testing.assert_close(compiled(*given), function(*given), rtol=2e-5, atol=2e-5)
    return sites


def sums(sites: list[Any]) -> list[str]:
    return [call for site in sites if site.kind == RESIDUAL for call in site.calls]


def added(x, s, w, o):
    return x + s[:, None] * F.linear(torch.tanh(F.linear(x, w)), o)


def added_the_other_way(x, s, w, o):
    return F.linear(torch.tanh(F.linear(x, w)), o) * s.unsqueeze(1) + x


def with_addcmul(x, s, w, o, e):
    return torch.addcmul(x, s.unsqueeze(1), F.linear(torch.tanh(F.linear(x, w)), o, e))


def with_addcmul_the_other_way(x, s, w, o):
    return torch.addcmul(x, F.linear(torch.tanh(F.linear(x, w)), o), s.unsqueeze(1), value=1)


def of_all_rows(x, e, w, o):
    return x + e * F.linear(torch.tanh(F.linear(x, w)), o)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (added, "xswo"),
        (added_the_other_way, "xswo"),
        (with_addcmul, "xswoe"),
        (with_addcmul_the_other_way, "xswo"),
        (of_all_rows, "xewo"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_products_gate_and_add(function: Function, names: str) -> None:
    assert sums(sites_of(function, names)) == ["linear_add: gate"]
    # PyTorch's ops keep what a backward needs, also of the gate alone.
    assert sums(sites_of(function, names, names)) == []
    assert sums(sites_of(function, names, names[1])) == []


def gate_of_each_token(x, r, w, o):
    return x + r * F.linear(torch.tanh(F.linear(x, w)), o)


def gate_of_columns(x, o, w):
    gate = x[:, :, :1]
    return x + gate * F.linear(torch.tanh(F.linear(x, w)), o)


def product_read_twice(x, s, w, o):
    h = F.linear(torch.tanh(F.linear(x, w)), o)
    return x + s[:, None] * h + h.abs()


def gated_read_twice(x, s, w, o):
    h = s[:, None] * F.linear(torch.tanh(F.linear(x, w)), o)
    return x + h + h.abs()


def gate_of_the_product(x, w, o):
    h = F.linear(torch.tanh(F.linear(x, w)), o)
    return x + h * torch.sigmoid(h)


def residual_written_between(x, s, w, o):
    r = x * 2
    h = torch.tanh(F.linear(r, w))
    y = F.linear(h, o)
    r.mul_(3)
    return torch.addcmul(r, s[:, None], y)


def input_written_between(x, s, w, o):
    a = torch.tanh(F.linear(x, w))
    h = F.linear(a, o)
    a.mul_(2)
    return x + s[:, None] * h + a.sum()


def gate_written_between(x, s, w, o):
    gate = s * 2
    h = gate[:, None] * F.linear(torch.tanh(F.linear(x, w)), o)
    gate.mul_(2)
    return x + h + gate.sum()


def gated_in_place(x, s, w, o):
    h = F.linear(torch.tanh(F.linear(x, w)), o)
    h *= s[:, None]
    return x + h


def with_another_factor(x, s, w, o):
    return torch.addcmul(x, s[:, None], F.linear(torch.tanh(F.linear(x, w)), o), value=2)


def with_a_wider_gate(x, s, w, o):
    return (x + s[:, None].double() * F.linear(torch.tanh(F.linear(x, w)), o)).float()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (gate_of_each_token, "xrwo"),
        (gate_of_columns, "xow"),
        (product_read_twice, "xswo"),
        (gated_read_twice, "xswo"),
        (gate_of_the_product, "xwo"),
        (input_written_between, "xswo"),
        (residual_written_between, "xswo"),
        (gate_written_between, "xswo"),
        (gated_in_place, "xswo"),
        (with_another_factor, "xswo"),
        (with_a_wider_gate, "xswo"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_products_do_not_gate(function: Function, names: str) -> None:
    assert sums(sites_of(function, names)) == []


def block(x, m, w, c, o, e):
    """A block of DiT, without attention."""
    shift1, scale1, gate1, shift2, scale2, gate2 = m.unsqueeze(1).chunk(6, -1)
    z = F.layer_norm(x, (K,)) * (1 + scale1) + shift1
    x = x + gate1 * F.linear(torch.tanh(F.linear(z, w, c)).sigmoid(), o, e)
    z = F.layer_norm(x, (K,)) * (1 + scale2) + shift2
    return x + gate2 * F.linear(F.gelu(F.linear(z, w, c)), o, e)


def test_block() -> None:
    """The second layer of an MLP becomes a call of its own."""
    names = "xmwcoe"
    sites = sites_of(block, names)
    assert [call for site in sites for call in site.calls] == [
        "norm_linear: modulation, 1 Linear",
        "norm_linear: modulation, gelu",
        "linear_add: gate",
        "linear_add: gate",
    ]
    followed = sites_of(block, names, names)
    assert [call for site in followed for call in site.calls] == [
        "norm_linear: modulation, 1 Linear",
        "norm_mlp: modulation, residual, gelu",
    ]
    assert not any(site.fused for site in sites_of(block, names, small=False))


def test_dynamic_sizes() -> None:
    """Regression: PyTorch's op raised an error on symbolic sizes, so the graph ran unchanged."""
    p = parameters()
    compiled, sites = with_sites(added, True, dynamic=True)
    with torch.no_grad():
        for batch, tokens in ((2, _TILE), (3, 2 * _TILE)):
            x, s = torch.randn(batch, tokens, K), torch.randn(batch, K)
            torch.testing.assert_close(compiled(x, s, p["w"], p["o"]), added(x, s, p["w"], p["o"]))
    assert sums(sites) == ["linear_add: gate"]
