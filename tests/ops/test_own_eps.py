"""RMSNorm with eps=None: that of the installed PyTorch, wherever it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_within_budget
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.ops import node

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
K, N = 24, 16


def pytorchs(dtype: torch.dtype, device: str) -> float:
    """Return PyTorch's eps: the norm of a much smaller row is the row over its root."""
    row = torch.full((1, K), 2.0**-14 if dtype is torch.float16 else 2.0**-60)
    ratio = row.double() / F.rms_norm(row.to(device, dtype), (K,)).double().cpu()
    if dtype is torch.float16:
        ratio = (ratio.square() - row.double().square()).sqrt()
    known = [torch.finfo(d).eps for d in DTYPES]
    return min(known, key=lambda eps: abs(eps / ratio[0, 0].item() ** 2 - 1))


def norm_linear(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    return fn.norm_linear(x, weight, normalization="rms_norm", norm_weight=gamma, eps=None)


def with_statistics(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    identity = torch.eye(K, dtype=x.dtype, device=x.device)
    options = {"normalization": "rms_norm", "eps": None}
    total, statistics = fn.linear_add(x, identity, None, torch.zeros_like(x), **options)
    return fn.norm_linear(total, weight, norm_weight=gamma, statistics=statistics, **options)


def module(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    norm = nn.RMSNorm(K, device=x.device, dtype=x.dtype)
    linear = nn.Linear(K, N, bias=False, device=x.device, dtype=x.dtype)
    norm.weight, linear.weight = nn.Parameter(gamma), nn.Parameter(weight)
    result: Tensor = fn.LayerNormLinear.from_modules(norm, linear)(x)
    return result


def plain(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (K,), gamma), weight)


def by_graph(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    torch._dynamo.reset()
    function = torch.compile(plain, backend="fused_norm", options={"small": True})
    result: Tensor = function(x, gamma, weight)
    return result


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", [norm_linear, with_statistics, module, by_graph])
@pytest.mark.parametrize("is_python", [False, True], ids=["", "python"])
def test_is_pytorchs(
    by: Callable[..., Tensor],
    dtype: torch.dtype,
    is_python: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was that of x's own dtype: 25 % off in bfloat16 at a root mean square of 0.1."""
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("float64 has no GPU kernel")
    if is_python:
        monkeypatch.setattr(node, "module", lambda: None)
    eps = pytorchs(dtype, device)
    x = (
        torch.randn(7, K, dtype=torch.float64)
        * torch.logspace(-1, -4, 7, dtype=torch.float64)[:, None]
    )
    gamma, weight = 1 + torch.randn(K) / 5, torch.randn(N, K) / 5
    given = [v.to(device, dtype) for v in (x, gamma, weight)]
    wide = [v.double() for v in given]
    truth = F.linear(F.rms_norm(wide[0], (K,), wide[1], eps), wide[2])
    with torch.no_grad():
        assert_within_budget("y", by(*given), truth, plain(*given))


def test_of_a_wider_norm() -> None:
    """A model's norm in float64 of float32 rows keeps float64's eps."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x.double(), (K,)).float(), weight)

    x, weight = torch.randn(5, K) * 1e-5, torch.randn(N, K)
    torch._dynamo.reset()
    found = torch.compile(function, backend="fused_norm", options={"small": True})(x, weight)
    wide = F.linear(F.rms_norm(x.double(), (K,)), weight.double())
    assert_within_budget("y", found, wide, function(x, weight))
