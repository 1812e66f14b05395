"""FP8 in whole models: which layers, why not the others, and what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.models.precision import SMALLEST


class Block(nn.Module):
    def __init__(self, features: int = 1024) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(features), nn.RMSNorm(features)
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.out = nn.Linear(features, features, bias=False)
        self.up, self.down = nn.Linear(features, 2048), nn.Linear(2048, features)
        self.head = nn.Linear(features, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(q * torch.sigmoid(k) + v)
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        y: Tensor = self.head(x)
        return y


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block().bfloat16()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 24, 1024).bfloat16()


def report(model: Block, x: Tensor, **options: Any) -> dict[str, str]:
    """Return what is said of each site, by its path."""
    sites = fn.explain(model, x, options={"then": "eager", **options}).sites
    return {site.path: site.implementation if site.fused else site.reason for site in sites}


def test_explain_says_in_which_precision_and_why_not(model: Block, x: Tensor) -> None:
    found = report(model, x, fp8="rowwise", skip=["out"])
    assert found == {
        "norm1": "FP8 rowwise",
        "norm2": "FP8 rowwise",
        "out": "skipped by 'out'",
        "head": f"a size of 96, below {SMALLEST}",
    }
    left = report(model, x, fp8="tensorwise", skip=["do*"])
    assert left["norm2"] == "bfloat16: down, skipped by 'do*'"
    assert left["out"] == "FP8 tensorwise"
    assert "head" not in report(model, x)


def test_no_sum_takes_a_layer_out_of_fp8(
    model: Block, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products add residuals in the precision that their layers have anyway."""
    monkeypatch.setattr("fused_norm.models.fuse._adds", lambda *_: True)
    assert report(model, x)["out"] == "kernels"
    assert report(model, x, fp8="rowwise")["out"] == "FP8 rowwise"
    left = report(model, x, fp8="rowwise", skip=["out"])
    assert left["out"] == "bfloat16: out, skipped by 'out'"


def test_autocast_fp8_is_the_default_of_the_option(model: Block, x: Tensor) -> None:
    with fn.autocast_fp8("blockwise"):
        assert report(model, x)["norm1"] == "FP8 blockwise"
        assert "FP8" not in report(model, x, fp8=None)["norm1"]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_model_and_its_gradients(model: Block, x: Tensor, recipe: str) -> None:
    options = {"then": "eager", "fp8": recipe}
    compiled = torch.compile(model, backend="fused_norm", options=options)
    y = compiled(x)
    y.float().square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    exact = model(x)
    exact.float().square().sum().backward()

    def decibels(a: Tensor, e: Tensor) -> float:
        a, e = a.detach().float(), e.detach().float()
        return float(20 * torch.log10(e.norm() / (a - e).norm()))

    assert decibels(y, exact) > 20
    for name, p in model.named_parameters():
        assert decibels(found[name], p.grad) > 17, name


def test_wrong_options_are_errors(model: Block, x: Tensor) -> None:
    with pytest.raises(ValueError, match="recipe must be one of"):
        fn.explain(model, x, options={"fp8": "colwise"})
    with pytest.raises(TypeError, match="skip must be a sequence"):
        fn.explain(model, x, options={"fp8": "rowwise", "skip": "head"})
