"""norm_linear, norm_mlp and linear_add against PyTorch: values and gradients over all options."""

from __future__ import annotations

import re
from typing import Any

import family
import pytest
import torch
from accuracy import as_copies
from family import PLAIN
from family_cases import CASES

import fused_norm as fn
from fused_norm.ops import node


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace("torch.", "") for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_values_and_gradients(case: dict[str, Any], device: str) -> None:
    if device == "cuda" and case["dtype"] is torch.float64:
        pytest.skip("float64 has no GPU kernel")
    family.check(case, family.make_tensors(case, device))


SOME = {
    "swiglu": {"weights": 2, "activation": "swiglu", "normalization": "rms_norm"},
    "q, k, v": {"weights": 3, "residual": True, "return_sum": True},
    "AdaLN": {"modulation": "batch", "gamma": "missing", "activation": "gelu"},
    "MLP": {"op": "norm_mlp", "activation": "geglu", "residual_out": True},
}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_node", [True, False], ids=["node", "Python"])
def test_an_mlp_may_do_without_an_activation(
    by_node: bool, dtype: torch.dtype, recompute: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_node:
        monkeypatch.setattr(node, "module", lambda: None)
    case = PLAIN | {"op": "norm_mlp", "activation": None, "dtype": dtype, "recompute": recompute}
    family.check(case, family.make_tensors(case, device))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_far_from_zero(name: str, dtype: torch.dtype, device: str) -> None:
    case = PLAIN | SOME[name] | {"dtype": dtype, "shape": ((3, 40), 257, 24)}
    family.check(case, family.make_tensors(case, device, mean=1000.0))


@pytest.mark.parametrize("name", SOME)
def test_every_run_gives_the_same_bits(name: str, device: str) -> None:
    case = PLAIN | SOME[name] | {"shape": ((5, 333), 96, 40)}
    tensors = family.make_tensors(case, device)
    runs = []
    for _ in range(3):
        copies = family.replaced(tensors, as_copies)
        results = family.ours(case, copies)
        torch.autograd.backward(results, [torch.ones_like(r) for r in results])
        runs.append([*results, *(leaf.grad for leaf in family.leaves(copies).values())])
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@pytest.mark.as_dispatched
def test_small_calls_are_pytorchs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Where the host takes longer than the kernels; large ones, and those captured, are ours."""
    called = []
    # Not so in C++, where a call begins as soon as PyTorch's ops do.
    monkeypatch.setattr("fused_norm.ops.node.module", lambda: None)
    op = "fused_norm.ops.norm_linear_ops.forward"
    monkeypatch.setattr(op, lambda *_: called.append(1) or 1 / 0)
    case = PLAIN | SOME["swiglu"]
    family.ours(case, family.make_tensors(case, device))
    assert not called
    large = case | {"shape": ((600,), 400, 700)}
    if device == "cpu":
        with pytest.raises(ZeroDivisionError):
            family.ours(large, family.make_tensors(large, device))


def test_linear_add(device: str) -> None:
    x, weight = torch.randn(3, 5, 24, device=device), torch.randn(16, 24, device=device)
    bias, residual = torch.randn(16, device=device), torch.randn(3, 5, 16, device=device)
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)]
    total, statistics = fn.linear_add(x, weight, bias, residual)
    expected = residual + torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(statistics.mean, expected.mean(-1))
    variance = expected.var(-1, correction=0)
    torch.testing.assert_close(statistics.rstd, (variance + 1e-5).rsqrt())
    grad = torch.randn_like(total)
    mine = torch.autograd.grad(total, leaves, grad)
    for ours, theirs in zip(mine, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="statistics are for normalization='layer_norm'"):
        fn.norm_linear(total, torch.randn(8, 16), normalization="rms_norm", statistics=statistics)
    with pytest.raises(ValueError, match="must be one of"):
        fn.linear_add(x, weight, bias, residual, normalization="batch_norm")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"normalization": "batch_norm"},
            ValueError,
            "('layer_norm', 'rms_norm'), got 'batch_norm'",
        ),
        ({"activation": "elu"}, ValueError, "'silu', 'reglu', 'geglu', 'geglu_tanh', 'swiglu')"),
        ({"eps": None}, TypeError, "eps"),
        ({"weight": torch.randn(6, 9)}, RuntimeError, "normalized_shape"),
        ({"norm_weight": torch.randn(7)}, RuntimeError, "normalized_shape"),
        ({"residual": torch.randn(3, 7)}, RuntimeError, "must match the size of tensor b"),
        ({"bias": torch.randn(5)}, RuntimeError, "expanded size"),
        ({"scale": torch.randn(2, 8)}, RuntimeError, "must match the size of tensor b"),
        ({"weight": []}, ValueError, "one or more weights"),
        ({"weight": [torch.randn(6, 8)] * 3, "activation": "swiglu"}, ValueError, "a pair of them"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(4, 8), "weight": torch.randn(6, 8)} | changes
    with pytest.raises(error, match=re.escape(words)):
        fn.norm_linear(arguments.pop("x"), arguments.pop("weight"), **arguments)
