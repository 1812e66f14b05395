"""Operands of a Linear layer in FP8, its gradients, the same by torchao, and decibels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

M, K, N = 48, 256, 384
# What each gradient of 3 and of 2 bits of mantissa leaves, in dB; torchao's are no better.
LEAST = 25.0
LEAST_OF_E5M2 = 23.5
# dB by which a product may fall short of torchao's in the same recipe.
SHORT = 0.3
TORCHAO = ("rowwise", "tensorwise", "rowwise_with_gw_hp")


def decibels(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach(), exact.detach()
    noise = (found.double() - exact.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))


def leaves(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return x, a weight, a bias and the gradient of y."""
    torch.manual_seed(seed)
    x, w, b, dy = torch.randn(M, K), torch.randn(N, K) / K**0.5, torch.randn(N), torch.randn(M, N)
    return [v.to(dtype).requires_grad_(v is not dy) for v in (x, w, b, dy)]


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Return y, dx, dweight and dbias of a function of the first three."""
    x, w, b = (v.detach().requires_grad_() for v in tensors[:3])
    y = function(x, w, b)
    return [y.detach(), *torch.autograd.grad(y, (x, w, b), tensors[3].to(y.dtype))]


def in_torchao(recipe: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return torchao's product, computed without FP8's tensor cores."""
    pytest.importorskip("torchao")
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    linear = nn.Linear(K, N, dtype=x.dtype)
    layer = Float8Linear.from_float(linear, config)
    y: Tensor = torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))
    return y
