"""Quantization: as matrices lie and transposed, with scales for rows and for a tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from devices import ON_HOPPER
from torch import Tensor
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.ops import eight_bits
from fused_norm.recipes import E4M3, E5M2, Cast

CASTS = [Cast(dtype, scaling) for dtype in (E4M3, E5M2) for scaling in ("row", "tensor")]
# Whole tiles of 128 by 64 and of 512 rows, ragged ones, one row, and one load.
SHAPES = [(256, 128), (1000, 1096), (513, 72), (1, 4096), (16, 8), (3000, 16)]


def matrix(shape: tuple[int, int], device: str) -> Tensor:
    """Return numbers of sizes that differ from row to row and from column to column."""
    torch.manual_seed(shape[0])
    rows, columns = (torch.randn(n, device=device).exp() ** 2 for n in shape)
    return (torch.randn(*shape, device=device) * rows[:, None] * columns).bfloat16()


def expected(v: Tensor, cast: Cast, power_of_two: bool) -> list[Tensor]:
    transposed = torch.nn.functional.pad(v, (0, 0, 0, -v.shape[0] % 16)).t()
    return [
        *recipes.quantize(v, cast, power_of_two),
        *recipes.quantize(transposed, cast, power_of_two),
    ]


def assert_same(found: list[Tensor], truth: list[Tensor]) -> None:
    assert len(found) == len(truth)
    for one, other in zip(found, truth, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        a, b = one.float(), other.float()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_HOPPER])]
)
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_bits_are_those_of_the_recipes(cast: Cast, device: str) -> None:
    for shape, power_of_two in itertools.product(SHAPES, (False, True)):
        v = matrix(shape, device)
        v[0, -1] = 0
        truth = expected(v, cast, power_of_two)
        found = eight_bits.quantize(v, cast, power_of_two, transposed=True)
        assert_same(found, truth)
        assert_same(eight_bits.quantize(v, cast, power_of_two), truth[:2])
        assert_same(
            eight_bits.quantize(v, cast, power_of_two, plain=False, transposed=True), truth[2:]
        )
        # A view with strided rows, and one that does not start at a multiple of 16 bytes.
        wide = torch.cat([v, v], 1)[:, 1 : 1 + shape[1]]
        assert_same(
            eight_bits.quantize(wide, cast, power_of_two, transposed=True),
            expected(wide.contiguous(), cast, power_of_two),
        )


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen(cast: Cast, number: float) -> None:
    v = matrix((300, 200), "cuda")
    v[40] = 0
    v[:, 7] = 0
    v[123, 45] = number
    q, scale, qt, scale_t = (
        t.float() for t in eight_bits.quantize(v, cast, False, plain=True, transposed=True)
    )
    whole, transposed = q * scale, (qt * scale_t)[:, :300].t()
    if cast.scaling == "tensor":
        # There is one scale for all.
        assert whole.isnan().all()
        return
    assert whole[123].isnan().all()
    assert whole.isnan().sum() == 200
    assert transposed[:, 45].isnan().all()
    assert transposed.isnan().sum() == 300
    assert not qt[:, 300:].any()
    assert not whole[40].any()
    assert not transposed[:, 7].any()


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("rows", [2048, 1001])
def test_gradients_of_kernels(recipe: str, rows: int) -> None:
    """In decibels of float64, and the same bits each time."""
    torch.manual_seed(0)
    x = torch.randn(rows, 1024, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(1536, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    g = torch.rand(1024, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(rows, 1536, device="cuda").bfloat16()
    options: Any = {"normalization": "rms_norm", "norm_weight": g, "eps": 1e-6}

    def step(how: str | None) -> tuple[Tensor, ...]:
        y = fn.norm_linear(x, w, recipe=how, **options)
        return (y, *torch.autograd.grad(y, (x, w, g), dy))

    wide = [t.detach().double().requires_grad_() for t in (x, w, g)]
    z = torch.nn.functional.rms_norm(wide[0], (1024,), wide[2], 1e-6)
    truth = [z @ wide[1].t()]
    truth += torch.autograd.grad(truth[0], wide, dy.double())
    found = step(recipe)
    least = 20.0 if recipe == "tensorwise" else 25.0
    for one, exact in zip(found, truth, strict=True):
        noise = (one.double() - exact).square().sum()
        assert 10 * torch.log10(exact.square().sum() / noise) > least
    assert all(torch.equal(a, b) for a, b in zip(found, step(recipe), strict=True))


@pytest.mark.parametrize("scaling", ["row", "tensor", "1x128"])
def test_registration(scaling: str) -> None:
    for plain, transposed in ((True, False), (False, True), (True, True)):
        arguments = (torch.randn(20, 256), False, scaling, True, plain, transposed)
        opcheck(torch.ops.fused_norm.fp8_quantize.default, arguments)
