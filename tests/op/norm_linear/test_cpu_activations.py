"""Activations after a CPU's products, of every number of 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_cpu_family import Case, forward
from torch import Tensor

# In place, by panels packed on use, and by packed ones; 600 are many rows on tile registers too.
ROWS = (1, 37, 600)
K = 8
# How much of h float32 may be off by: PyTorch's own GELU is off by as much.
OFF = 2.0**-23
EXACT: dict[int, Callable[[Tensor], Tensor]] = {
    1: F.relu,
    2: lambda h: 0.5 * h * torch.erfc(-(0.5**0.5) * h),
    3: lambda h: h * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)),
    4: lambda h: h * torch.sigmoid(1.702 * h),
    5: F.silu,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_every_number(kind: int, dtype: torch.dtype) -> None:
    """A number is the bias of an output whose weight is 0."""
    h = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    exact = EXACT[kind](h.double())
    exact[h == -torch.inf] = 0.0 if kind == 1 else torch.nan
    # Half the distance between numbers of the type; results that are no normal numbers may be 0.
    tiny = torch.finfo(dtype).tiny
    _, exponent = torch.frexp(exact.abs().clamp_min(tiny))
    half = torch.finfo(dtype).eps / 4 * torch.exp2(exponent.double())
    most = half + OFF * h.double().abs() + (tiny if dtype is torch.bfloat16 else 0.0)
    for rows in ROWS:
        case = Case((rows, K, len(h)), dtype, activation=kind)
        tensors = case.tensors()
        tensors["weight"].zero_()
        tensors["bias"] = h
        y = forward(case, tensors, h=False)["y"]
        assert (y.view(torch.int16) == y[0].view(torch.int16)).all()
        y = y[0].double()
        assert torch.equal(y.isnan(), exact.isnan())
        is_finite = exact.isfinite()
        assert torch.equal(y[exact.isinf()], exact[exact.isinf()])
        assert ((y - exact).abs() <= most)[is_finite].all()
