"""Numbers at the edge of their types: far from zero, huge, tiny, equal, not numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_copies, as_float64, check, eager, make_inputs
from torch import Tensor

import fused_norm as fn

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def gradients(function: object, inputs: list[Tensor], grad_output: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = function(*leaves)
    y.backward(grad_output)
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("mean", [1e3, 1e4, 1e5, 1e6])
def test_means_to_a_million(mean: float, dtype: torch.dtype, device: str) -> None:
    """What is lost in rounding x itself is lost to both; ours loses no more."""
    if mean > torch.finfo(dtype).max:
        pytest.skip(f"{dtype} has no number so large")
    inputs = make_inputs(64, 512, 64, dtype=dtype, device=device, mean=mean, requires_grad=True)
    # Rows are constant where the steps of the type exceed the deviations.
    if inputs[0].detach().double().std(-1).min() == 0:
        y = fn.fused_layernorm_linear(*inputs)
        assert y.isfinite().all()
        return
    check(inputs)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e15, 1e17])
def test_scales_of_float32(scale: float, device: str) -> None:
    """Without eps any scale gives the same values, as long as its square is a number."""
    inputs = make_inputs(40, 300, 20, device=device)
    expected = fn.fused_layernorm_linear(*inputs, 0.0)
    inputs[0] = inputs[0] * scale
    y = fn.fused_layernorm_linear(*inputs, 0.0)
    if scale < 1e-18:
        # The squares are below float32's normal numbers: whatever PyTorch says, it must not be
        # worse than PyTorch.
        exact = eager(*as_float64(inputs), 0.0)
        bar = (eager(*inputs, 0.0).double() - exact).nan_to_num(nan=1e30, posinf=1e30).norm()
        assert (y.double() - exact).nan_to_num(nan=1e30, posinf=1e30).norm() <= 2 * bar
    else:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [1e-40, 1e-44, 1e-38])
def test_subnormal_rows(value: float, device: str) -> None:
    """Their variance is 0 in float32, so eps decides: rows are deviations over its root."""
    _, gamma, beta, weight, bias = make_inputs(1, 100, 10, device=device)
    x = (torch.arange(100.0, device=device) - 50).expand(3, 100) * value
    y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    torch.testing.assert_close(y, F.linear(beta, weight, bias).expand_as(y))


def test_rows_that_sum_to_infinity(device: str) -> None:
    """At 8.5e37 the sum of a row overflows, its mean does not. PyTorch on a CPU gives NaN."""
    _, gamma, beta, weight, bias = make_inputs(1, 100, 10, device=device)
    x = torch.full((3, 100), 8.5e37, device=device)
    y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    torch.testing.assert_close(y, F.linear(beta, weight, bias).expand_as(y))


@pytest.mark.parametrize("magnitude", [1e19, 1e20, 1e30, 3e38])
def test_rows_whose_variance_overflows(magnitude: float, device: str) -> None:
    """A variance of infinity makes rows of zeros or of NaN, as in PyTorch; never another row's."""
    inputs = make_inputs(8, 100, 10, device=device)
    clean = fn.fused_layernorm_linear(*inputs)
    inputs[0][5] *= magnitude
    y = fn.fused_layernorm_linear(*inputs)
    others = torch.arange(8) != 5
    assert torch.equal(y[others], clean[others])
    beta, weight, bias = inputs[2:]
    constant = F.linear(beta, weight, bias)
    exact = eager(*(t.double() for t in inputs))[5]
    is_right = (y[5].double() - exact).abs().max() < 1e-2
    assert is_right or y[5].isnan().all() or torch.allclose(y[5], constant, atol=1e-4)


def test_largest_float16_rows(device: str) -> None:
    inputs = make_inputs(8, 128, 10, dtype=F16, device=device, requires_grad=True)
    with torch.no_grad():
        inputs[0].copy_(torch.where(torch.rand_like(inputs[0]) < 0.5, 65504.0, -65504.0))
    y, exact = fn.fused_layernorm_linear(*inputs), eager(*as_float64(inputs))
    torch.testing.assert_close(y.double(), exact, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.usefixtures("own_kernels")
def test_bad_numbers_stay_in_their_row(dtype: torch.dtype, bad: float, device: str) -> None:
    """Of y and of dx only the row is lost; parameters' gradients are NaN where they sum over it.

    PyTorch's bfloat16 on a CPU loses another row to it, so its float64 says what is to be NaN.
    """
    inputs = make_inputs(40, 100, 30, dtype=dtype, device=device)
    grad_output = torch.randn(40, 30, device=device).to(dtype)
    clean = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    inputs[0][7, 3] = bad
    results = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    expected = gradients(eager, [t.double() for t in inputs], grad_output.double())
    others = torch.arange(40) != 7
    for mine, before in zip(results[:2], clean[:2], strict=True):
        assert mine[7].isnan().all()
        if device == "cpu":
            assert torch.equal(mine[others], before[others])
        else:
            torch.testing.assert_close(mine[others], before[others])
    for mine, other in zip(results, expected, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())


@pytest.mark.parametrize("where", ["ln_weight", "ln_bias", "linear_weight", "linear_bias", "dy"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_parameters_spread_as_in_pytorch(where: str, bad: float, device: str) -> None:
    inputs = make_inputs(20, 30, 10, device=device)
    grad_output = torch.randn(20, 10, device=device)
    tensors = dict(
        zip(("x", "ln_weight", "ln_bias", "linear_weight", "linear_bias"), inputs, strict=True),
        dy=grad_output,
    )
    tensors[where].view(-1)[3] = bad
    results = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    expected = gradients(eager, inputs, grad_output)
    for mine, other in zip(results, expected, strict=True):
        assert torch.equal(mine.isfinite(), other.isfinite())


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.5, 1e3, 1e38, -1e-5, -0.5, math.inf, math.nan])
@pytest.mark.parametrize("rows", ["normal", "constant", "one feature"])
def test_any_eps(rows: str, eps: float, device: str) -> None:
    """0 with a constant row is 0/0, a negative one may be a root of less than 0: as in PyTorch."""
    inputs = make_inputs(10, 1 if rows == "one feature" else 30, 8, device=device)
    if rows == "constant":
        inputs[0].fill_(3.0)
    grad_output = torch.randn(10, 8, device=device)
    results = gradients(lambda *a: fn.fused_layernorm_linear(*a, eps), inputs, grad_output)
    wide = [t.double() for t in inputs]
    exact = gradients(lambda *a: eager(*a, eps), wide, grad_output.double())
    for mine, other in zip(results, exact, strict=True):
        atol = 1e-5 * max(1.0, other.nan_to_num().abs().max().item())
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_one_feature_is_the_bias(dtype: torch.dtype, device: str) -> None:
    """A row of one has no deviation: zeros, so that dx is exactly 0 for any value."""
    inputs = make_inputs(9, 1, 5, dtype=dtype, device=device, mean=100.0, requires_grad=True)
    y = fn.fused_layernorm_linear(*inputs)
    y.backward(torch.randn_like(y))
    _, _, beta, weight, bias = inputs
    torch.testing.assert_close(y, F.linear(beta, weight, bias).expand_as(y))
    assert not inputs[0].grad.any()
    assert not inputs[1].grad.any()


def test_an_outlier_in_a_row(device: str) -> None:
    inputs = make_inputs(30, 512, 20, device=device, requires_grad=True)
    with torch.no_grad():
        inputs[0][:, 100] = 1e6
    check(inputs)


def test_zero_gradients_give_zeros(device: str) -> None:
    inputs = make_inputs(30, 50, 20, device=device)
    for result in gradients(fn.fused_layernorm_linear, inputs, torch.zeros(30, 20, device=device))[
        1:
    ]:
        assert not result.any()
        assert not result.signbit().all()


def test_gradients_overflow_as_pytorchs_do(device: str) -> None:
    """float16 gradients beyond 65504 are infinite, for a loss scaler to see."""
    inputs = make_inputs(64, 50, 20, dtype=F16, device=device)
    grad_output = torch.full((64, 20), 6e4, dtype=F16, device=device)
    mine = gradients(fn.fused_layernorm_linear, as_copies(inputs), grad_output)
    theirs = gradients(eager, as_copies(inputs), grad_output)
    assert mine[-1].isinf().all()
    if device == "cpu":
        assert not any(t.isnan().any() for t in mine)
    # Between its products a GPU rounds to float16 as PyTorch does, so infinities may meet.
    for ours, other in zip(mine, theirs, strict=True):
        assert not (ours.isnan() & ~other.isnan()).any()
