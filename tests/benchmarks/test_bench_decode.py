"""Decoding: that a step is one, and what of it is ours."""

from __future__ import annotations

import pytest
import torch

import fused_norm as fn
from benchmarks import decode


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> decode.Model:
    sizes = {
        "BLOCKS": 2,
        "WIDTH": 64,
        "HIDDEN": 96,
        "HEADS": 4,
        "SHARED": 2,
        "HEAD": 16,
        "CACHE": 8,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(decode, name, size)
    torch.manual_seed(0)
    return decode.Model(3).eval().requires_grad_(False)


def test_a_step_writes_the_last_place_of_each_cache_alone(model: decode.Model) -> None:
    x = torch.randn(3, 1, 64)
    before = [block.keys.clone() for block in model.blocks]
    y = model(x)
    # The same token again: graphs are replayed.
    assert torch.equal(model(x), y)
    for block, keys in zip(model.blocks, before, strict=True):
        assert torch.equal(block.keys[:, :, :-1], keys[:, :, :-1])
        assert not (block.keys[:, :, -1] == keys[:, :, -1]).any()
    # Its result depends on what is in the caches.
    model.blocks[0].values[:, :, 0] += 1
    assert not torch.equal(model(x), y)


def test_norms_are_fused_with_all_products_behind_them(model: decode.Model) -> None:
    with torch.no_grad():
        report = fn.explain(model, torch.randn(3, 1, 64), options={"small": True})
    calls = [site.calls for site in report.sites if site.kind == "rms_norm"]
    mlp = ["norm_mlp: residual, swiglu"]
    assert calls == [["norm_linear: 3 Linear"], mlp, ["norm_linear: residual, 3 Linear"], mlp]
