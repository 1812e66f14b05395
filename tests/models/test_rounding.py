"""Casts between a norm and its Linear layers: which rounding is kept, and where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_float64, assert_within_budget
from compiling import with_sites
from torch import Tensor

K, N = 24, 40
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def given(dtype: torch.dtype) -> list[Tensor]:
    """Return rows, gamma and a weight."""
    tensors = [torch.randn(3, 5, K), 1 + 0.2 * torch.randn(K), torch.randn(N, K) / K**0.5]
    return [each.to(dtype) for each in tensors]


def fake_quantized(z: Tensor, low: torch.dtype) -> Tensor:
    """Round to 8 bits with a scale, as quantization-aware training does."""
    scale = z.detach().abs().amax() / torch.finfo(low).max
    return (z / scale).to(low).to(z.dtype) * scale


def straight(z: Tensor, low: torch.dtype) -> Tensor:
    return z.to(low).to(z.dtype)


def then_wide(z: Tensor, low: torch.dtype) -> Tensor:
    return z.to(torch.float32).to(low).to(z.dtype)


@pytest.mark.parametrize("rounding", ["once", "model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("low", FLOAT8, ids=str)
@pytest.mark.parametrize("quantize", [fake_quantized, straight, then_wide])
@pytest.mark.parametrize("where", ["rows", "rows that others read", "x", "gamma", "weight"])
def test_fake_quantization(
    where: str,
    quantize: Callable[..., Tensor],
    low: torch.dtype,
    dtype: torch.dtype,
    rounding: str,
) -> None:
    """Both casts were left out, and with them what the model was trained for."""

    def function(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, g, w = (
            quantize(v, low) if where == n else v
            for v, n in ((x, "x"), (g, "gamma"), (w, "weight"))
        )
        z = F.rms_norm(x, (K,), g, 1e-5)
        more = (z.sin(),) if where == "rows that others read" else ()
        return (F.linear(quantize(z, low) if where.startswith("rows") else z, w), *more)

    def without(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (K,), g, 1e-5), w)

    p = given(dtype)
    run, _ = with_sites(function, True, rounding=rounding)
    ours, own = run(*p)[0].double(), function(*p)[0].double()
    lost = (without(*p).double() - own).norm()
    assert (ours - own).norm() < 0.25 * lost


def narrow(z: Tensor) -> Tensor:
    return z.to(torch.bfloat16)


def rows(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(narrow(F.layer_norm(x, (K,), g)).float(), w)


def between_norm_and_gamma(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(narrow(F.layer_norm(x, (K,))).float() * g, w)


def rows_that_others_read(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    z = F.layer_norm(x, (K,), g)
    return F.linear(narrow(z).float(), w) + z.sum(-1, keepdim=True).relu() * 0


def gamma(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (K,), narrow(g).float()), w)


def gamma_times(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (K,)) * narrow(g).float(), w)


def squares(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    root = torch.rsqrt(narrow(x).float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(x * root * g, w)


@pytest.mark.parametrize(
    "function",
    [rows, between_norm_and_gamma, rows_that_others_read, gamma, gamma_times, squares],
    ids=lambda f: f.__name__,
)
def test_rounding_of_the_model(function: Callable[..., Tensor]) -> None:
    """Asked for the model's rounding, the pass left the model's casts out."""
    p = given(torch.float32)
    run, sites = with_sites(function, True, rounding="model")
    torch.testing.assert_close(run(*p), function(*p), rtol=2e-5, atol=2e-5)
    assert not sites[0].fused
    run, sites = with_sites(function, True, rounding="once")
    torch.testing.assert_close(run(*p), function(*p), rtol=2e-2, atol=2e-2)
    assert sites[0].fused, sites[0].reason


def test_rounding_that_the_call_makes_too() -> None:
    """A norm in float32 that is rounded once, to the dtype of its rows, is what the call does."""

    def function(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x.float(), (K,), g.float(), None, 1e-5).to(x.dtype), w)

    run, sites = with_sites(function, True, rounding="model")
    p = given(torch.bfloat16)
    assert_within_budget("y", run(*p), function(*as_float64(p)), function(*p))
    assert sites[0].fused, sites[0].reason


def test_view_as_another_dtype() -> None:
    """It was taken for a view of the same values, and left out."""

    def function(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (K,), g).view(torch.float16).to(x.dtype), w)

    p = given(torch.bfloat16)
    run, _ = with_sites(function, True, rounding="once")
    torch.testing.assert_close(run(*p), function(*p), equal_nan=True)
