"""What is almost a pattern: the backend leaves it, or computes all that the model does.

Results and gradients are compared with those of the model itself, and so is which inputs have a
gradient at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor

from fused_norm.models import Site

K, N = 16, 24
Function = Callable[..., Tensor]


def given() -> dict[str, Tensor]:
    """Return what the functions below take by name; tensors of weights and rows have gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"x": (4, 6, K), "g": (K,), "w": (N, K), "v": (N, N)}
    shapes |= {"c": (4, 6, N), "h": (2, 3, 5, K)}
    found = {name: torch.randn(s, generator=generator) for name, s in shapes.items()}
    found = {name: t.requires_grad_() for name, t in found.items()}
    angles = torch.randn(5, K // 2, generator=generator).repeat(1, 2)
    found |= {"cos": angles.cos(), "sin": angles.sin(), "labels": torch.arange(24)}
    return found | {"i": torch.arange(K) % 3, "m": torch.arange(K) % 2 == 0}


def held(function: Function, **options: Any) -> list[Site]:
    """Compare a function with itself compiled; return what became of its norms and heads."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    compiled, sites = with_sites(function, small=True, **options)
    results = []
    for run in (function, compiled):
        inputs = given()
        y = run(*(inputs[name] for name in names))
        y.backward(torch.linspace(-1.0, 1.0, y.numel()).reshape(y.shape).to(y.dtype))
        results.append([y.detach(), *(inputs[name].grad for name in names)])
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=2e-5)
    return sites


def root_without_gradients(x, w):
    with torch.no_grad():
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return F.linear(x * root, w)


def variance_without_gradients(x, w):
    with torch.no_grad():
        variance = x.var(-1, False, True)
    return F.linear((x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5), w)


def rows_copied_without_gradients(x, w):
    with torch.no_grad():
        rows = x.clone()
    return F.linear(F.layer_norm(rows, (K,)), w)


def rows_viewed_without_gradients(x, w):
    with torch.no_grad():
        rows = x.view(4, 6, K)
    return F.linear(F.layer_norm(rows, (K,)), w)


def norm_copied_without_gradients(x, w):
    z = F.layer_norm(x, (K,))
    with torch.no_grad():
        rows = z.clone()
    return F.linear(rows, w)


def gamma_times_norm_without_gradients(x, g, w):
    z = F.layer_norm(x, (K,))
    with torch.no_grad():
        z = z * g
    return F.linear(z, w)


def offset_gamma_without_gradients(x, g, w):
    with torch.no_grad():
        gamma = 1 + g
    return F.linear(F.layer_norm(x, (K,)) * gamma, w)


def weight_copied_without_gradients(x, w):
    with torch.no_grad():
        copy = w.clone()
    return F.linear(F.layer_norm(x, (K,)), copy)


def weight_turned_without_gradients(x, w):
    with torch.no_grad():
        turned = w.t()
    return F.layer_norm(x, (K,)) @ turned


def head_without_gradients_of_its_weight(x, w, labels):
    with torch.no_grad():
        copy = w.clone()
    return F.cross_entropy(F.linear(x, copy).view(-1, N), labels)


def head_without_gradients_of_views(x, w, labels):
    logits = F.linear(x, w)
    with torch.no_grad():
        logits = logits.view(-1, N)
    return F.cross_entropy(logits, labels) + w.sum()


def rotation_without_gradients_of_gamma(h, g, cos, sin):
    with torch.no_grad():
        gamma = g.clone()
    z = F.rms_norm(h, (K,), gamma, 1e-5)
    first, second = z.chunk(2, -1)
    return z * cos + torch.cat([-second, first], -1) * sin


@pytest.mark.parametrize(
    "function",
    [
        root_without_gradients,
        variance_without_gradients,
        rows_copied_without_gradients,
        rows_viewed_without_gradients,
        norm_copied_without_gradients,
        gamma_times_norm_without_gradients,
        offset_gamma_without_gradients,
        weight_copied_without_gradients,
        weight_turned_without_gradients,
        head_without_gradients_of_its_weight,
        head_without_gradients_of_views,
        rotation_without_gradients_of_gamma,
    ],
    ids=lambda each: each.__name__,
)
def test_no_gradient_goes_where_the_model_records_none(function: Function) -> None:
    held(function)


def test_sums_of_a_weight_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(c, v):
        with torch.no_grad():
            copy = v.clone()
        return F.linear(c.sin(), copy) + c

    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda *_: True)
    assert not held(function)


def scaled_by_integers(x, i, w):
    return F.linear(F.layer_norm(x, (K,)) * i, w)


def scaled_by_a_mask(x, m, w):
    return F.linear(F.layer_norm(x, (K,)) * m, w)


@pytest.mark.parametrize(
    "function", [scaled_by_integers, scaled_by_a_mask], ids=lambda each: each.__name__
)
def test_integers_and_masks_beside_a_norm(function: Function) -> None:
    held(function)


def normalized_rows(x, w):
    return F.linear(F.normalize(x, dim=-1, eps=3.0), w)


def clamped_lengths(x, w):
    return F.linear(x / x.norm(dim=-1, keepdim=True).clamp(min=3.0), w)


@pytest.mark.parametrize(
    "function", [normalized_rows, clamped_lengths], ids=lambda each: each.__name__
)
def test_a_bound_of_lengths_that_rows_reach(function: Function) -> None:
    (site,) = held(function)
    assert site.reason == "lengths below 3 count as 3"


def test_two_softcaps_of_logits() -> None:
    def function(x, w, labels):
        logits = torch.tanh(torch.tanh(F.linear(x, w) / 2.0) * 2.0 / 1.5) * 1.5
        return F.cross_entropy(logits.view(-1, N), labels)

    (site,) = held(function)
    assert not site.fused


def test_rows_that_gamma_multiplies_first_are_rounded() -> None:
    def function(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(g * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), w)

    inputs = [given()[name].detach().bfloat16() for name in ("x", "g", "w")]
    compiled, sites = with_sites(function, small=True, rounding="model")
    torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=0, atol=0)
    assert "rounded between the norm" in sites[0].reason
