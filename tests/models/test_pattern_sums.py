"""Sums of residuals that products add, or leave."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from patterns import Function, N, fused, normed, parameters


def attention_and_mlp(x, g, b, w, c, o, e, d):
    """Both sums of a block: one that a norm reads, and one after an MLP."""
    s = x + F.linear(torch.tanh(F.linear(normed(x, g, b), w, c)), o, e)
    s = s + F.linear(F.gelu(F.linear(normed(s, g, b), w, d)), o)
    return F.linear(normed(s, g, b), w), s


def sum_in_place(x, w, o, r):
    s = r * 2
    s += F.linear(F.linear(x, w), o)
    return s


def layer_read_twice(x, w, o, e, v):
    h = F.linear(F.linear(x, w), o, e)
    return x + h, F.linear(h, v)


def of_two_layers(x, w, c, o, e):
    return F.linear(F.linear(x, w, c), o) + F.linear(F.linear(x, w), o, e)


def layer_on_a_norm(x, r, g, b, w, c, o):
    s = torch.cat([r, r], -1)[..., :N] + F.linear(normed(x, g, b), w, c)
    return F.linear(F.layer_norm(s, (N,)), o), s


def written_before_the_sum(x, w, r):
    a = (x * 1.5).detach()
    h = F.linear(a, w.detach())
    a.mul_(2)
    return torch.cat([r, r], -1)[..., :N] + h, a * r


@pytest.mark.parametrize(
    ("function", "sums", "calls"),
    [
        (
            attention_and_mlp,
            1,
            ["norm_linear: 1 Linear", "norm_mlp: gelu, residual after", "norm_linear: 1 Linear"],
        ),
        (sum_in_place, 1, []),
        (layer_read_twice, 0, []),
        (of_two_layers, 1, []),
        (layer_on_a_norm, 0, ["norm_linear: 1 Linear", "norm_linear: residual, 1 Linear"]),
        (written_before_the_sum, 0, []),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_sums_that_products_add(
    monkeypatch: pytest.MonkeyPatch, function: Function, sums: int, calls: list[str]
) -> None:
    """As on a device whose products add a residual at no cost."""
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda x, weight: True)
    monkeypatch.setattr("fused_norm.ops.linear_add.may_multiply", lambda *_: True)
    monkeypatch.setattr("fused_norm.ops.linear_add.is_small", lambda *_: False)
    sites = fused(function, parameters())
    assert [call for site in sites for call in site.calls] == calls + ["linear_add"] * sums
    left = fused(function, parameters(), small=False)
    assert not any(site.fused for site in left)


def test_sums_keep_the_rounding_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda x, weight: True)
    p = parameters(torch.bfloat16)
    for rounding, count in (("once", 1), ("model", 0)):
        compiled, sites = with_sites(sum_in_place, rounding=rounding)
        compiled(p["x"], p["w"], p["o"], p["r"])
        assert len(sites) == count
