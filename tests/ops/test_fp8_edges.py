"""FP8 at its edges, forward and backward: outliers, zeros, no numbers, sizes, and long sums.

On Hopper these are the kernels: all is bfloat16.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fp8_products import LEAST, LEAST_OF_E5M2, SHORT, TORCHAO, K, M, N, decibels, gradients
from fp8_products import in_torchao as by_torchao
from torch import Tensor

import fused_norm as fn
from fused_norm import recipes
from fused_norm.ops import fp8
from fused_norm.recipes import E5M2

RECIPES = list(recipes.RECIPES)


def operands(device: str, m: int = M, k: int = K, n: int = N) -> list[Tensor]:
    """Return x, a weight, a bias and the gradient of y."""
    torch.manual_seed(m + k)
    tensors = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(m, n)
    return [v.to(device, torch.bfloat16) for v in tensors]


def step(recipe: str, *tensors: Tensor) -> list[Tensor]:
    """Return y, dx, dweight and dbias."""
    return gradients(lambda x, w, b: fp8.scaled_linear(x, w, b, recipe=recipe), *tensors)


def exact_step(*tensors: Tensor) -> list[Tensor]:
    """Return the same in float64."""
    return gradients(F.linear, *(v.double() for v in tensors))


def least(recipe: str, name: str) -> float:
    of_e5m2 = recipes.find(recipe).grad.dtype is E5M2 and name != "y"
    return LEAST_OF_E5M2 if of_e5m2 else LEAST


NAMES = ("y", "dx", "dweight")


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_are_not_numbers_are_seen_where_they_are(recipe: str, device: str) -> None:
    x, w, *_ = operands(device)
    x[3, 5], x[9, 100] = torch.nan, torch.inf
    y = fn.norm_linear(x, w, normalization="rms_norm", recipe=recipe)
    bad = torch.zeros(M, dtype=torch.bool)
    bad[[3, 9]] = True
    if recipes.find(recipe).input.scaling == "tensor":
        # All rows share a scale, which says so.
        assert not y.isfinite().any()
        return
    assert not y[bad].isfinite().any()
    assert y[~bad].isfinite().all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_that_are_not_numbers_are_seen_where_they_are(
    recipe: str, number: float, device: str
) -> None:
    x, w, b, dy = operands(device)
    dy[3, 5] = number
    _, dx, dweight, _ = step(recipe, x, w, b, dy)
    how = recipes.find(recipe)
    if how.grad.scaling == "tensor":
        assert not dx.isfinite().any()
        assert not dweight.isfinite().any()
        return
    # A row of dy is a row of dx, and a column one of dweight.
    for found, place in ((dx, 3), (dweight, 5)):
        bad = torch.zeros(len(found), dtype=torch.bool)
        bad[place] = True
        assert not found[bad].isfinite().any()
        assert found[~bad].isfinite().all()
    x[7, 11] = number
    _, _, dweight, _ = step(recipe, x, w, b, dy.nan_to_num(0, 0, 0))
    bad = torch.zeros(K, dtype=torch.bool)
    bad[11] = True
    assert not dweight[:, bad].isfinite().any()
    assert dweight[:, ~bad].isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1e-10, 1e-6, 1.0, 1e20])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_huge_and_tiny_numbers(recipe: str, size: float, which: str, device: str) -> None:
    x, w, b, dy = operands(device)
    x, dy = (v * size if name == which else v for name, v in (("x", x), ("dy", dy)))
    b.zero_()
    exact = exact_step(x, w, b, dy)
    for name, found, e in zip(NAMES, step(recipe, x, w, b, dy), exact, strict=False):
        assert decibels(found, e) > least(recipe, name), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_smaller_than_any_scale_is_zero(recipe: str, device: str) -> None:
    x, w, _, dy = operands(device)
    y, dx, dweight, _ = step(recipe, x * 1e-30, w, torch.zeros_like(dy[0]), dy * 1e-30)
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert dweight.abs().max() < 1e-25


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_outliers(recipe: str, device: str) -> None:
    x, w, b, dy = operands(device)
    b.zero_()
    x[5], dy[8], dy[:, 21] = 0, 0, 0
    x[:, 17] *= 1000
    dy[:, 19] *= 1000
    found, exact = step(recipe, x, w, b, dy), exact_step(x, w, b, dy)
    y, dx, dweight, _ = found
    assert (y[5] == 0).all()
    assert (dx[8] == 0).all()
    assert (dweight[21] == 0).all()
    # The feature itself is as exact as any; the others keep what a scale for it leaves them.
    for name, a, e in zip(NAMES, found, exact, strict=False):
        assert decibels(a, e) > least(recipe, name), name
    y, dx, dweight, _ = step(recipe, torch.zeros_like(x), w, b, torch.zeros_like(dy))
    assert not any(v.any() for v in (y, dx, dweight))


@pytest.mark.parametrize("recipe", TORCHAO)
def test_outliers_leave_what_they_leave_in_torchao(recipe: str) -> None:
    x, w, b, dy = operands("cpu")
    x[:, 17] *= 1000
    dy[4] *= 1000
    dy[:, 19] *= 1000
    ours, exact = step(recipe, x, w, b, dy), exact_step(x, w, b, dy)
    theirs = gradients(lambda *t: by_torchao(recipe, *t), x, w, b, dy)
    # Without the outliers, too.
    rest = {"y": (slice(None), slice(None)), "dx": (slice(5, None),), "dweight": (slice(20, None),)}
    rest["dweight"] = (slice(20, None), slice(18, None))
    for i, name in enumerate(NAMES):
        for part in ((...,), rest[name]):
            a, t, e = (each[i][part] for each in (ours, theirs, exact))
            assert decibels(a, e) > decibels(t, e) - SHORT, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_have_zero_gradients(recipe: str, device: str) -> None:
    x, w, b, dy = operands(device)
    found = step(recipe, x[:0], w, b, dy[:0])
    assert [v.shape for v in found] == [(0, N), (0, K), (N, K), (N,)]
    assert not any(v.any() for v in found)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(16, 16384, 32), (16384, 32, 16), (16, 32, 16384)], ids=str)
def test_long_sums(recipe: str, shape: tuple[int, int, int], device: str) -> None:
    """Of y by K, of dweight by the rows, of dx by the outputs."""
    tensors = operands(device, *shape)
    exact = exact_step(*tensors)
    for name, found, e in zip(NAMES, step(recipe, *tensors), exact, strict=False):
        assert decibels(found, e) > least(recipe, name), name
