"""Autocast casts the operands of products as it casts those of `F.linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm.composition import Operands, Spec
from fused_norm.ops import head as head_ops
from fused_norm.ops.autocast import cast, dtype_of_products
from fused_norm.ops.operands import as_kernels_need, at_every_size

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_is_that_of_linear(dtype: torch.dtype) -> None:
    v = torch.ones(16, 16, dtype=dtype)
    assert dtype_of_products(v) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert dtype_of_products(v) is torch.bfloat16
        (mine,) = cast(torch.bfloat16, v)
        assert mine.dtype is F.linear(v, v).dtype
    assert cast(torch.bfloat16, None, 3, v.long())[2].dtype is torch.int64


def test_summands_and_modulation_have_one_dtype_with_rows() -> None:
    """As PyTorch adds and multiplies them; no other dtype is left to PyTorch's ops."""
    x, residual = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(3, 16)
    scale, weight, bias = torch.ones(16), torch.ones(32, 16), torch.ones(32)
    t = Operands(x, residual, scale=scale.bfloat16(), weights=[weight], biases=[bias])
    wide = torch.ones(3, 16, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        ready = as_kernels_need(Spec(), t)
        others = [t._replace(x=wide), t._replace(biases=[bias.double()])]
        assert [as_kernels_need(Spec(), other) for other in others] == [None, None]
    assert ready is not None
    rows = [ready.x, ready.residual, ready.scale]
    assert [v.dtype for v in rows if v is not None] == [torch.float32] * 3
    products = [*ready.weights, *ready.biases]
    assert [v.dtype for v in products if v is not None] == [torch.bfloat16] * 2


def test_products_are_those_of_cast_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    # No head is left to `F.linear`.
    monkeypatch.setattr(head_ops, "FEW_LOGITS", -1)
    x, weight, bias, residual = (torch.randn(*s) for s in [(64, 32), (48, 32), (48,), (64, 48)])
    target = torch.randint(48, (64,))
    narrow = [v.bfloat16() for v in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16), fn.batch_invariant():
        loss = fn.linear_cross_entropy(x, weight, target, bias)
        total = fn.linear_add(x, weight, bias, residual, normalization=None)[0]
    assert torch.equal(loss, fn.linear_cross_entropy(*narrow[:2], target, narrow[2]))
    with fn.batch_invariant():
        zeros = torch.zeros(64, 48, dtype=torch.bfloat16)
        product = fn.linear_add(*narrow, zeros, normalization=None)[0]
    assert torch.equal(total, residual + product)


@pytest.mark.parametrize("call", ["norm_linear", "norm_mlp"])
@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("is_derived", [False, True])
def test_backward_after_autocast(call: str, rows: int, is_derived: bool) -> None:
    """Regression: without rows, and for second derivatives, it multiplied two dtypes."""
    shapes = [(rows, 16), (16,), (32, 16), (32,), (16, 32)]
    x, gamma, weight, bias, out = inputs = [torch.randn(s).requires_grad_() for s in shapes]
    norm: dict[str, Any] = {"norm_weight": gamma}

    def ours() -> Tensor:
        if call == "norm_linear":
            y: Tensor = fn.norm_linear(x, weight, bias, **norm)
            return y
        return fn.norm_mlp(x, weight, bias, out, None, activation="gelu", **norm)

    def composed() -> Tensor:
        h = F.linear(F.layer_norm(x, (16,), gamma), weight, bias)
        return h if call == "norm_linear" else F.linear(F.gelu(h), out)

    def gradients(function: Callable[[], Tensor]) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            y = function()
        how: Any = {"create_graph": is_derived, "allow_unused": True}
        found = torch.autograd.grad(y.float().sin().sum(), inputs, **how)
        if not is_derived:
            return [y, *found]
        total = torch.stack([g.float().square().sum() for g in found if g is not None]).sum()
        return [y, *found, *torch.autograd.grad(total, inputs, allow_unused=True)]

    with at_every_size():
        found, expected = gradients(ours), gradients(composed)
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
            assert torch.linalg.vector_norm(mine - other) <= 0.03 * torch.linalg.vector_norm(other)


def test_meta_tensors_under_autocast() -> None:
    """Regression: PyTorch raises an error where it is asked for the autocast of such a device."""
    x, w = torch.empty(3, 16, device="meta"), torch.empty(32, 16, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert dtype_of_products(x) is None
        assert fn.norm_linear(x, w).shape == (3, 32)


def test_heads_of_two_dtypes_are_pytorchs() -> None:
    """Regression: a weight in float64 was cast, which `F.linear` refuses with narrower rows."""
    x, target = torch.ones(3, 16), torch.zeros(3, dtype=torch.int64)
    weight = torch.ones(32, 16, dtype=torch.float64)

    def composed(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    with torch.autocast("cpu", torch.bfloat16):
        for function in (composed, fn.linear_cross_entropy):
            with pytest.raises(RuntimeError, match="dtype"):
                function(x, weight, target)
