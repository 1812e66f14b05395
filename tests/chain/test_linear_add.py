"""linear_add without statistics: by a product that adds, on a device that has one."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from launches import names
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fused_norm as fn
from fused_norm.ops import linear_add as ops
from fused_norm.ops.operands import adds_in_product

M, K, N = (3, 5), 24, 16


def leaves(device: str, dtype: torch.dtype = torch.float32, scale: int = 1) -> list[Tensor]:
    shapes = ((*M[:-1], M[-1] * scale, K * scale), (N * scale, K * scale))
    shapes += ((N * scale,), (*shapes[0][:-1], N * scale))
    return [(0.2 * torch.randn(s, device=device)).to(dtype).requires_grad_() for s in shapes]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return residual + F.linear(x, weight, bias)


@pytest.fixture
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose products add."""
    monkeypatch.setattr(ops, "may_multiply", lambda *_: True)
    monkeypatch.setattr(ops, "is_small", lambda *_: False)


@pytest.mark.usefixtures("_added")
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients(device: str, has_bias: bool) -> None:
    x, weight, bias, residual = leaves(device)
    given = [v for v in (x, weight, bias if has_bias else None, residual) if v is not None]
    call = (x, weight, bias if has_bias else None, residual)
    total, statistics = fn.linear_add(*call, normalization=None)
    assert statistics is None
    assert "LinearAdd" in total.grad_fn.name()
    expected = plain(*call)
    torch.testing.assert_close(total, expected)
    dy = torch.randn_like(total)
    for ours, theirs in zip(
        torch.autograd.grad(total, given, dy, create_graph=True),
        torch.autograd.grad(expected, given, dy, create_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(fn.linear_add(*call, normalization=None)[0], expected)


# Where nothing builds the kernels of float64.
@pytest.mark.filterwarnings("ignore:fused_norm has no kernels for torch.float64:UserWarning")
@pytest.mark.usefixtures("_added")
def test_registration(device: str) -> None:
    tensors = leaves(device)
    torch.library.opcheck(torch.ops.fused_norm.linear_add.default, [t.detach() for t in tensors])
    double = [t.detach().double().requires_grad_() for t in tensors]
    call = lambda *t: fn.linear_add(*t, normalization=None)[0]  # noqa: E731
    assert torch.autograd.gradcheck(call, double)
    assert torch.autograd.gradgradcheck(call, double)
    with FlopCounterMode(display=False) as counter:
        call(*tensors)
    assert counter.get_total_flops() == 2 * 15 * K * N


@pytest.mark.usefixtures("_added")
def test_what_is_wrong_pytorch_says(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it broadcasts or promotes, it does: kernels read as many elements as they write."""
    monkeypatch.setattr(ops, "_op", None)
    x, weight, bias, residual = (t.detach() for t in leaves(device))
    for call, words in (
        ((x, weight[:, 1:], bias, residual), "cannot be multiplied"),
        ((x, weight, bias, residual[..., 1:]), "must match the size of tensor"),
        ((x, weight.double(), None, residual), "dtype"),
    ):
        with pytest.raises(RuntimeError, match=words):
            fn.linear_add(*call, normalization=None)
    wide = fn.linear_add(x, weight, bias, residual.double(), normalization=None)[0]
    assert wide.dtype is torch.float64
    row = residual[0, 0].requires_grad_()
    total = fn.linear_add(x, weight, bias, row, normalization=None)[0]
    dy = torch.randn_like(total)
    torch.testing.assert_close(torch.autograd.grad(total, row, dy)[0], dy.sum((0, 1)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 512])
def test_where_few_rows_are_added(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 17 to 64 rows PyTorch's product reads the weight faster, and adds a third matrix."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper")
    monkeypatch.setattr(ops, "is_small", lambda *_: False)
    x, weight, residual = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, 2048), (16384, 2048), (rows, 16384))
    )
    is_ours = not 16 < rows <= 64
    assert adds_in_product(x, weight) == is_ours
    found = []
    call = (x, weight, None, residual, False)
    launched = names(lambda: found.append(torch.ops.fused_norm.linear_add(*call)))
    assert ("fused_norm" in launched) == is_ours, launched
    exact = residual.double() + x.double() @ weight.double().t()
    theirs = (residual + F.linear(x, weight)).double()
    # Ours is rounded once.
    most = (theirs - exact).norm() * (1.0 if is_ours else 1.01)
    assert (found[0].double() - exact).norm() < most


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_consumers_in_turn_when_a_product_adds_on_hopper(dtype: torch.dtype) -> None:
    """Where consumers take tiles in turn, each has the upper and the lower half of its rows."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper")
    shapes = ((8192, 1024), (2048, 1024), (8192, 2048))
    x, weight, residual = ((0.2 * torch.randn(s, device="cuda")).to(dtype) for s in shapes)
    found = []
    call = (x, weight, None, residual, False)
    launched = names(lambda: found.append(torch.ops.fused_norm.linear_add(*call)))
    assert re.search(r"fused_norm_matrix_\w+_128x128_ping_pong_add", launched), launched
    exact = residual.double() + x.double() @ weight.double().t()
    theirs = (residual + F.linear(x, weight)).double()
    assert (found[0].double() - exact).norm() < (theirs - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_product_adds_on_hopper(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product, rounded once, and the pass that uses the same plan."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper")
    from fused_norm.models.report import explain

    monkeypatch.setattr(ops, "is_small", lambda *_: False)
    tensors = leaves("cuda", dtype, 128)
    x, weight, *_ = tensors
    assert adds_in_product(x, weight)
    found = []
    for options in ({"normalization": None}, {"eps": 1e-3}):
        launched = names(lambda o=options: found.append(fn.linear_add(*tensors, **o)))
        assert launched.count("fused_norm_matrix") == 1, launched
        assert not any(name in launched for name in ("nvjet", "gemm")), launched
    (total, _), (same, statistics) = found
    exact = plain(*(t.detach().double() for t in tensors))
    theirs = (plain(*tensors).double() - exact).norm()
    assert (total.double() - exact).norm() <= theirs
    assert torch.equal(same, total)
    rows = total.detach().double()
    mean, rstd = rows.mean(-1), (rows.var(-1, correction=0) + 1e-3).rsqrt()
    torch.testing.assert_close(statistics.mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(statistics.rstd.double(), rstd, rtol=1e-5, atol=0.0)
    dy = torch.randn_like(total)
    for ours, own in zip(
        torch.autograd.grad(total, tensors, dy),
        torch.autograd.grad(plain(*tensors), tensors, dy),
        strict=True,
    ):
        torch.testing.assert_close(ours, own, rtol=2e-2, atol=2e-2)
    report = explain(lambda *t: plain(*t) * 2, *tensors, options={"small": True})
    assert [site.calls for site in report.sites] == [["linear_add"]]
    assert "0 of 0 norms fused in 1 graph, 1 sum added by products" in str(report)
