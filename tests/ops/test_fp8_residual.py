"""A Linear layer in FP8 that adds a residual: `linear_add`, MLPs, and their gradients.

On a CPU `fp8_kernels` replaces Hopper's kernels, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import matrix
from fp8_kernels import running
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.chain import kernels
from fused_norm.ops import fp8, quantized
from fused_norm.recipes import E4M3, Cast

BF16 = torch.bfloat16
RECIPES = list(recipes.RECIPES)
B, M, K, N = 2, 20, 64, 48
Ran = list[tuple[str, int]]


@pytest.fixture
def ran(tmp_path: Path) -> Iterator[Ran]:
    with running(tmp_path) as names:
        yield names


def names(ran: Ran) -> list[str]:
    return [name for name, _ in ran]


def operands(dtype: torch.dtype = BF16, has_bias: bool = True) -> list[Any]:
    """Return x, a weight, a bias and a residual that take gradients."""
    x, w, r = matrix(B, M, K), matrix(N, K, seed=1) / 8, matrix(B, M, N, seed=3)
    b = matrix(N, seed=2) if has_bias else None
    return [None if v is None else v.to(dtype).requires_grad_() for v in (x, w, b, r)]


def add(x: Tensor, w: Tensor, b: Tensor | None, r: Tensor, recipe: str | None) -> Tensor:
    return fn.linear_add(x, w, b, r, normalization=None, recipe=recipe)[0]


def rounded_once(x: Tensor, w: Tensor, b: Any, r: Tensor, recipe: str, rounds: bool) -> Tensor:
    """Return the sum by its definition, in float32 and then in the dtype of x."""
    how = recipes.find(recipe)
    with torch.no_grad():
        rows = recipes.quantize(x.reshape(-1, K), how.input, rounds)
        by = recipes.quantize(w, how.weight, rounds)
        y = recipes.product(rows, how.input.scaling, by, how.weight.scaling)
        y = y if b is None else y + b.float()
        return (y.view(r.shape) + r.float()).to(x.dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("trains", [False, True])
def test_a_sum_is_rounded_once(recipe: str, has_bias: bool, trains: bool, ran: Ran) -> None:
    x, w, b, r = operands(has_bias=has_bias)
    rounds = trains and recipes.find(recipe).power_of_two
    expected = rounded_once(x, w, b, r, recipe, rounds)
    with torch.set_grad_enabled(trains):
        if not trains:
            w.requires_grad_(False)
        twice = fp8.scaled_linear(x, w, b, recipe=recipe) + r
        without = names(ran)
        ran.clear()
        found = add(x, w, b, r, recipe)
    assert torch.equal(found, expected)
    assert not torch.equal(found, twice)
    # The same launches as without the sum.
    assert names(ran) == without
    assert names(ran)[-1] == "linear"
    assert found.requires_grad == trains


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_sum_by_pytorch_is_rounded_once(recipe: str, dtype: torch.dtype) -> None:
    x, w, b, r = operands(dtype)
    rounds = recipes.find(recipe).power_of_two
    assert torch.equal(add(x, w, b, r, recipe), rounded_once(x, w, b, r, recipe, rounds))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiles", [False, True])
def test_gradients_are_those_of_the_layer_and_of_the_sum(
    recipe: str, compiles: bool, ran: Ran
) -> None:
    given, dy = operands(), matrix(B, M, N, seed=5)
    function = torch.compile(add, backend="aot_eager") if compiles else add
    found = torch.autograd.grad(function(*given, recipe), given, dy)
    assert "linear" in names(ran)
    y = fp8.scaled_linear(*given[:3], recipe=recipe) + given[3]
    expected = torch.autograd.grad(y, given, dy)
    for a, e in zip(found, expected, strict=True):
        assert (a.dtype, a.stride()) == (e.dtype, e.stride())
        assert torch.equal(a, e)
    # Each alone, and a result that nothing depends on.
    for i, v in enumerate(given):
        (alone,) = torch.autograd.grad(add(*given, recipe), [v], dy)
        assert torch.equal(alone, expected[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_have_no_kernels(dtype: torch.dtype, ran: Ran) -> None:
    x, w, b, r = operands(dtype)
    found = add(x, w, b, r, "rowwise")
    y = fp8.scaled_linear(x, w, b, recipe="rowwise")
    torch.testing.assert_close(found, y + r, rtol=1e-6, atol=1e-6)
    # The residual keeps its bits.
    far = r.detach() * 2**40
    assert torch.equal(add(x.detach() * 0, w, None, far, "rowwise"), far)
    assert found.dtype is dtype
    assert not ran


def test_what_does_not_fit_is_added_as_in_pytorch(ran: Ran) -> None:
    x, w, b, r = operands()
    y = fp8.scaled_linear(x, w, b, recipe="rowwise")
    others = [r.detach()[:, :1], r.detach()[0], r.detach().float(), torch.tensor(2.0, dtype=BF16)]
    others += [r.detach()[None]]
    for other in others:
        found = add(x, w, b, other, "rowwise")
        expected = other + y
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        add(x, w, b, r.detach().reshape(2 * B, M // 2, N), "rowwise")
    for wrong in (r.detach()[..., :16], matrix(3, M, N)):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            add(x, w, b, wrong, "rowwise")


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_residuals_of_any_layout(recipe: str, ran: Ran) -> None:
    x, w, b, r = (v.detach() for v in operands())
    whole = matrix(2 * B, 2 * N, 2 * N, seed=4)
    residuals = [whole[::2, : 2 * M : 2, :N], whole[:B, :M, 1 : N + 1]]
    residuals += [whole[:B, :N, :M].transpose(1, 2)]
    residuals += [whole.flatten()[1 : 1 + r.numel()].view(r.shape), whole[:1, :M, :N].expand_as(r)]
    for residual in residuals:
        kept = residual.clone()
        expected = rounded_once(x, w, b, residual, recipe, False)
        ran.clear()
        found = add(x, w, b, residual, recipe)
        assert torch.equal(found, expected)
        assert found.is_contiguous()
        assert torch.equal(residual, kept)
        assert names(ran).count("linear") == 1


def test_under_autocast(ran: Ran) -> None:
    """The sum is in the dtype that PyTorch's would have."""
    x, w, b, r = operands(torch.float32)
    with torch.autocast("cpu", BF16):
        y = fp8.scaled_linear(x, w, b, recipe="rowwise")
        assert y.dtype is BF16
        for residual in (r, r.bfloat16()):
            found = add(x, w, b, residual, "rowwise")
            assert found.dtype is (y + residual).dtype
            torch.testing.assert_close(found, y + residual, rtol=0.02, atol=0.02)
        ran.clear()
        add(x, w, b, r.bfloat16(), "rowwise")
        assert names(ran)[-1] == "linear"


def test_weights_in_8_bits(ran: Ran) -> None:
    """Their product adds what takes no gradient; another residual keeps its own."""
    x, w, b, r = (v.detach() for v in operands())
    q, scale = recipes.quantize(w, Cast(E4M3, "row"), False)
    held = quantized.scaled_weight(q, scale, "rowwise", BF16)
    expected = rounded_once(x, w, b, r, "rowwise", False)
    assert torch.equal(add(x, held, b, r, "rowwise"), expected)
    r.requires_grad_()
    found = add(x, held, b, r, "rowwise")
    (dr,) = torch.autograd.grad(found, r, torch.ones_like(r))
    assert torch.equal(dr, torch.ones_like(r))
    with torch.no_grad():
        assert torch.equal(add(x, held, b, r, "rowwise"), expected)


def test_frozen_weights(ran: Ran) -> None:
    x, w, b, r = (v.detach() for v in operands())
    layer = torch.nn.Linear(K, N, dtype=BF16)
    layer.weight.data, layer.bias.data = w, b
    layer.eval().requires_grad_(False)
    fn.freeze(layer)
    expected = rounded_once(x, w, b, r, "rowwise", False)
    for _ in range(2):
        ran.clear()
        assert torch.equal(add(x, layer.weight, layer.bias, r, "rowwise"), expected)
    # The weight is there in 8 bits.
    assert names(ran) == ["quantize", "linear"]
    assert ran[-1][1] != 0


def test_statistics_of_the_sum() -> None:
    x, w, b, r = operands()
    with fn.autocast_fp8("rowwise"):
        total, statistics = fn.linear_add(x, w, b, r, normalization="rms_norm", eps=1e-6)
    assert torch.equal(total, add(x, w, b, r, "rowwise"))
    assert statistics is not None
    exact = (total.double().square().mean(-1) + 1e-6).rsqrt()
    torch.testing.assert_close(statistics.rstd.double(), exact, rtol=1e-5, atol=0)
    # None even there.
    with fn.autocast_fp8("rowwise"):
        assert torch.equal(add(x, w, b, r, ""), add(x, w, b, r, None)) is False
        inside = add(x, w, b, r, "")
    assert torch.equal(inside, add(x, w, b, r, None))


def test_wrong_calls() -> None:
    x, w, b, r = operands()
    with pytest.raises(ValueError, match="recipe must be one of"):
        add(x, w, b, r, "colwise")
    with pytest.raises(RuntimeError, match="multiples of 16"):
        add(x, w[:40], b[:40], r[..., :40], "rowwise")
    # PyTorch's product of no features is its bias: nothing writes that in FP8.
    with pytest.raises(RuntimeError, match="multiples of 16"):
        fp8.scaled_linear(x[..., :0], w[:, :0], b, recipe="rowwise")
    with fn.batch_invariant(), pytest.raises(RuntimeError, match="no FP8 products"):
        add(x, w, b, r, "rowwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp_that_trains_adds_in_its_last_product(recipe: str, ran: Ran) -> None:
    mlp = fn.LayerNormMLP(K, 128, activation="gelu", recipe=recipe, dtype=BF16)
    x, r = matrix(B, M, K).requires_grad_(), matrix(B, M, K, seed=3).requires_grad_()
    mlp(x)
    without = names(ran)
    ran.clear()
    found = mlp(x, residual_out=r)
    assert names(ran) == without
    y = mlp(x)
    dy = matrix(B, M, K, seed=4)
    of = (x, *mlp.parameters())
    expected = torch.autograd.grad(y, of, dy)
    *gradients, dr = torch.autograd.grad(found, (*of, r), dy)
    assert all(map(torch.equal, gradients, expected))
    assert torch.equal(dr, dy)
    twice = y + r
    assert not torch.equal(found, twice)
    torch.testing.assert_close(found, twice, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scaling", [("row", "row"), ("tensor", "tensor"), ("1x128", "128x128")])
def test_registration(scaling: tuple[str, str], ran: Ran) -> None:
    x, w, b, r = (v.detach() for v in operands())
    for keeps in (False, True):
        how = (*scaling, True, BF16, False, "", False, keeps, keeps, r)
        tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        opcheck(
            torch.ops.fused_norm.fp8_layers.default, (x, [w], [None], [b], *how), test_utils=tests
        )
    assert ran


def test_only_hoppers_products_add(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(fp8.adds_in_product(matrix(M, K), recipe) for recipe in RECIPES)
    monkeypatch.setattr(kernels, "is_hopper", lambda index: index == 0)
    with FakeTensorMode():
        for device, dtype in (("cuda:0", BF16), ("cuda:0", torch.float16), ("cuda:1", BF16)):
            x = torch.empty(M, K, device=device, dtype=dtype)
            expected = device == "cuda:0" and dtype is BF16
            assert all(fp8.adds_in_product(x, recipe) == expected for recipe in RECIPES)
