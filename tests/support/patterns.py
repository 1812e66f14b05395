"""Functions whose norms are fused or left, and what holds them against themselves compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor

from fused_norm.models import Site

K, N = 24, 40
Function = Callable[..., Any]


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return what the functions below take: rows, and parameters of all sizes."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"x": (2, 5, K), "r": (2, 5, K), "g": (K,), "b": (K,), "w": (N, K), "v": (N, K)},
        **{"c": (N,), "d": (N,), "p": (2 * N, K), "o": (K, N), "e": (K,), "s": (2, K), "t": (2, K)},
    }
    found = {name: 0.5 * torch.randn(shape) for name, shape in shapes.items()}
    return {name: v.to(dtype).requires_grad_() for name, v in found.items()}


def run(function: Function, p: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return results and gradients of a function of some parameters by their names."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = {name: p[name].detach().clone().requires_grad_() for name in names}
    outputs = run.compiled(*given.values()) if run.compiled else function(*given.values())
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, dys)
    return outputs, {name: v.grad for name, v in given.items() if v.grad is not None}


run.compiled = None  # type: ignore[attr-defined]


def fused(function: Function, p: dict[str, Tensor], **options: Any) -> list[Site]:
    """Hold a function against itself compiled; return what became of its norms."""
    expected = run(function, p)
    run.compiled, sites = with_sites(function, True, **options)  # type: ignore[attr-defined]
    try:
        found = run(function, p)
    finally:
        run.compiled = None  # type: ignore[attr-defined]
    for a, b in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
    assert expected[1].keys() == found[1].keys()
    for name, a in expected[1].items():
        torch.testing.assert_close(found[1][name], a, rtol=1e-4, atol=1e-4, msg=name)
    return sites


def llama(x: Tensor, g: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return g * h.to(x.dtype)


def normed(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (K,), g, b, 1e-5)


def mlp(x, r, g, b, w, c, o, e):
    s = x + r
    h = F.relu(F.linear(normed(s, g, b), w, c))
    return F.linear(F.dropout(h, 0.0), o, e), s
