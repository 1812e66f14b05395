"""Several Linear layers on the same rows in FP8: one call, on Hopper one launch where that pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_products import decibels
from torch import Tensor
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.ops import scaled
from fused_norm.recipes import E4M3, Cast


def layers(
    M: int, K: int, sizes: tuple[int, ...], has_bias: tuple[bool, ...], scaling: str = "row"
) -> tuple[Any, list[Tensor], list[Tensor | None]]:
    """Return rows in 8 bits with their scales, weights and biases."""
    torch.manual_seed(M + K)
    q = recipes.quantize(torch.randn(M, K).bfloat16(), Cast(E4M3, scaling), False)
    weights = [(torch.randn(n, K) / K**0.5).bfloat16() for n in sizes]
    pairs = zip(sizes, has_bias, strict=True)
    return q, weights, [torch.randn(n).bfloat16() if has else None for n, has in pairs]


SIZES = [(256, 48, 16), (128, 128), (1024, 256, 256, 64), (4096, 1024, 1024)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("biases", ["all", "none", "some"])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_as_one_after_another(
    sizes: tuple[int, ...], biases: str, scaling: str, device: str
) -> None:
    has = tuple(biases == "all" or (biases == "some" and i == 1) for i in range(len(sizes)))
    for M in (1, 16, 40, 300) + ((4096,) if device == "cuda" else ()):
        q, weights, bs = layers(M, 256, sizes, has, scaling)
        q, weights = [v.to(device) for v in q], [w.to(device) for w in weights]
        bs = [b if b is None else b.to(device) for b in bs]
        how = (scaling, scaling, False)
        none = [None] * len(sizes)
        found = scaled.linears(*q, weights, none, *how, bs, torch.bfloat16)
        for y, weight, bias in zip(found, weights, bs, strict=True):
            one = scaled.linear(*q, weight, None, *how, bias, None, "", torch.bfloat16)
            assert (y.shape, y.dtype, y.stride()) == (one.shape, one.dtype, one.stride())
            # Kernels for few rows add the halves of their sums.
            assert decibels(y, one) > 45
            if device == "cpu":
                assert torch.equal(y, one)
        again = scaled.linears(*q, weights, none, *how, bs, torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_family_has_them_as_alone() -> None:
    x, w, v = torch.randn(48, 256), torch.randn(256, 256), torch.randn(48, 256)
    for weights in ((w, v), (w, v, w)):
        for follows in (False, True):
            rows = x.clone().requires_grad_(follows)
            found = fn.norm_linear(rows, weights, recipe="rowwise")
            for y, weight in zip(found, weights, strict=True):
                alone = fn.norm_linear(rows, weight, recipe="rowwise")
                assert torch.equal(y, alone)


def test_registration() -> None:
    # Its test of the schema compares inputs, which PyTorch cannot do in 8 bits.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    q, weights, biases = layers(48, 256, (256, 48), (True, False))
    arguments = (*q, weights, [None, None], "row", "row", False, biases, torch.bfloat16, False)
    opcheck(torch.ops.fused_norm.fp8_linears.default, arguments, test_utils=tests)
    (weight, _), (bias, _) = weights, biases
    alone = (*q, weight, None, "row", "row", False, bias, None, "", torch.bfloat16)
    opcheck(torch.ops.fused_norm.fp8_linear.default, (*alone, *[None] * 3, False), test_utils=tests)
