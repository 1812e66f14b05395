"""Weights that torchao has quantized: used directly, with its own values, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_norm as fn
from fused_norm import recipes
from fused_norm.recipes import E4M3, Cast

quantization: Any = pytest.importorskip("torchao.quantization")
quant_api: Any = pytest.importorskip("torchao.quantization.quant_api")

M, K, N = 48, 256, 384
# dB by which a call may fall short of torchao's.
SHORT = 0.3
GRANULARITIES = {"rowwise": quantization.PerRow(), "tensorwise": quantization.PerTensor()}
SCALINGS = {"rowwise": "row", "tensorwise": "tensor"}


def decibels(found: Tensor, exact: Tensor) -> float:
    noise = (found.double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def layers(recipe: str, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[nn.Linear, Any]:
    """Return a Linear layer, and the same quantized by torchao, which asks for a GPU first."""
    torch.manual_seed(0)
    linear, same = (nn.Linear(K, N, dtype=torch.bfloat16) for _ in range(2))
    same.load_state_dict(linear.state_dict())
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    how = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=GRANULARITIES[recipe], **config
    )
    model = nn.Sequential(same)
    quantization.quantize_(model, how)
    return linear, model[0]


def rows() -> tuple[Tensor, Tensor]:
    """Return x and gamma."""
    torch.manual_seed(1)
    return torch.randn(M, K).bfloat16(), torch.rand(K).bfloat16()


@pytest.mark.parametrize("recipe", list(GRANULARITIES))
@pytest.mark.parametrize("returns_norm", [False, True])
def test_values_are_no_worse_than_those_of_torchao(
    recipe: str, returns_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, theirs = layers(recipe, monkeypatch)
    x, gamma = rows()
    with torch.no_grad():
        options: Any = {"norm_weight": gamma, "normalization": "rms_norm", "eps": 1e-6}
        y: Any = fn.norm_linear(
            x, theirs.weight, theirs.bias, recipe=recipe, return_norm=returns_norm, **options
        )
        y = y[0] if returns_norm else y
        z = F.rms_norm(x.double(), (K,), gamma.double(), 1e-6)
        exact = F.linear(z, linear.weight.double(), linear.bias.double())
        other = theirs(F.rms_norm(x, (K,), gamma, 1e-6))
    assert y.dtype is torch.bfloat16
    assert decibels(y, exact) > max(25, decibels(other, exact) - SHORT)


@pytest.mark.parametrize("recipe", list(GRANULARITIES))
def test_numbers_and_scales_of_the_weight_are_its_own(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, theirs = layers(recipe, monkeypatch)
    x, gamma = rows()
    weight: Any = theirs.weight
    # Numbers below the largest: quantized again, they would be others.
    weight.qdata.copy_((weight.qdata.float() / 3).to(E4M3))
    weight.scale.mul_(3)
    with torch.no_grad():
        y = fn.norm_linear(x, weight, norm_weight=gamma, eps=1e-6, recipe=recipe)
        z = F.layer_norm(x.float(), (K,), gamma.float(), None, 1e-6)
        q, scale = recipes.quantize(z, Cast(E4M3, SCALINGS[recipe]), False)
        exact = (q.double() * scale) @ (weight.qdata.double() * weight.scale).t()
    assert decibels(y, exact) > 45


def test_another_recipe_and_gradients_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    _, theirs = layers("rowwise", monkeypatch)
    x, _ = rows()
    with pytest.raises(ValueError, match="quantized for recipe='rowwise'"):
        fn.norm_linear(x, theirs.weight, recipe="blockwise")
    with pytest.raises(NotImplementedError, match="has no gradients"):
        fn.norm_linear(x.requires_grad_(), theirs.weight, recipe="rowwise")


def test_bounds_of_maxima_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, theirs = layers("rowwise", monkeypatch, activation_value_ub=1.0)
    with pytest.raises(NotImplementedError, match="maxima of rows have bounds"):
        fn.norm_linear(rows()[0], theirs.weight, recipe="rowwise")
