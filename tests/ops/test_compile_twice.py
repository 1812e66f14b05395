"""Calls in compiled programs to which a tensor comes twice, as the residual of an MLP does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiling import ITS_OWN_WARNINGS
from torch import Tensor

import fused_norm as fn

pytestmark = ITS_OWN_WARNINGS


def _mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return fn.norm_mlp(x, w, None, v, None, activation="gelu", residual_out=x)


def _norm(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y: Tensor = fn.norm_linear(x, w, residual=x, activation="silu") @ v.t()
    return y


def _add(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    total, statistics = fn.linear_add(x, v @ w, None, x)
    y: Tensor = fn.norm_linear(total, w, statistics=statistics)
    return y


def _weight(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    first, second = fn.norm_linear(x, [w, w])
    return (first * second) @ v.t()


@pytest.mark.parametrize("call", [_mlp, _norm, _add, _weight], ids=lambda f: f.__name__.strip("_"))
def test_gradients(call: Callable[..., Tensor], device: str) -> None:
    """Regression: the graph broke there, and with PyTorch 2.11 one of the gradients was lost."""
    torch.compiler.reset()
    x = torch.randn(40, 32, device=device, requires_grad=True)
    w = (torch.randn(64, 32, device=device) / 8).requires_grad_()
    v = (torch.randn(32, 64, device=device) / 8).requires_grad_()

    def whole(*tensors: Tensor) -> Tensor:
        # What comes before gets the gradient of x.
        return call(torch.tanh(tensors[0]), *tensors[1:]).square().sum()

    expected = torch.autograd.grad(whole(x, w, v), (x, w, v))
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x, w, v), (x, w, v))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
