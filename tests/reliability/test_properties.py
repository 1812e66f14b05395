"""What holds for every input: invariances, identities, and agreement of the strategies.

That MAX graphs give the same bits as the library is held in test_max_ops.py.
"""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from accuracy import assert_within_budget, eager, make_inputs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import hopper_goes
from torch import Tensor

import fused_norm as fn
from fused_norm import reference
from fused_norm.call import record

EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**31)
sizes = st.tuples(st.integers(1, 80), st.integers(1, 150), st.integers(1, 70))
some_rows = st.tuples(st.integers(2, 80), st.integers(3, 150), st.integers(1, 70))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def inputs_of(shape: tuple[int, int, int], seed: int, **options: object) -> list[Tensor]:
    torch.manual_seed(seed)
    return make_inputs(*shape, **options)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


@EXAMPLES
@given(some_rows, seeds, st.floats(-100, 100))
def test_a_shift_of_x_changes_nothing(shape: tuple[int, int, int], seed: int, shift: float) -> None:
    x, *parameters = inputs_of(shape, seed, dtype=torch.float64)
    assume(x.std(-1).min() > 0.1)
    y = fn.fused_layernorm_linear(x, *parameters)
    torch.testing.assert_close(
        fn.fused_layernorm_linear(x + shift, *parameters), y, rtol=1e-9, atol=1e-9
    )


@EXAMPLES
@given(some_rows, seeds, st.integers(-60, 60))
def test_a_scale_of_x_changes_nothing_without_eps(
    shape: tuple[int, int, int], seed: int, exponent: int
) -> None:
    """Powers of two, which round nothing, change no bit."""
    x, *parameters = inputs_of(shape, seed)
    assume(x.std(-1).min() > 0.1)
    y = fn.fused_layernorm_linear(x, *parameters, 0.0)
    scaled = fn.fused_layernorm_linear(x * 2.0**exponent, *parameters, 0.0)
    torch.testing.assert_close(scaled, y, rtol=1e-5, atol=1e-5)


@EXAMPLES
@given(some_rows, seeds, dtypes)
def test_rows_do_not_know_each_other(
    shape: tuple[int, int, int], seed: int, dtype: torch.dtype
) -> None:
    """Bit for bit: a permutation, a part, and concatenated parts. dx too."""
    x, *parameters = inputs_of(shape, seed, dtype=dtype)
    x.requires_grad_()
    y = fn.fused_layernorm_linear(x, *parameters)
    grad_output = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad_output)
    order = torch.randperm(len(x))
    cut = len(x) // 2
    for rows in (order, order[:1], order[:cut], slice(0, cut), slice(cut, None)):
        part = x.detach()[rows].requires_grad_()
        partial = fn.fused_layernorm_linear(part, *parameters)
        assert torch.equal(partial, y[rows])
        assert torch.equal(torch.autograd.grad(partial, part, grad_output[rows])[0], dx[rows])


@EXAMPLES
@given(sizes, seeds)
def test_linear_in_weight_and_bias(shape: tuple[int, int, int], seed: int) -> None:
    x, gamma, beta, weight, bias = inputs_of(shape, seed, dtype=torch.float64)
    other = torch.randn_like(weight)

    def y(w: Tensor, b: Tensor | None) -> Tensor:
        return fn.fused_layernorm_linear(x, gamma, beta, w, b)

    sum_of_parts = y(weight, bias) + 2 * y(other, None)
    torch.testing.assert_close(y(weight + 2 * other, bias), sum_of_parts, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        y(weight, bias) - y(weight, None), bias.expand(len(x), -1), rtol=1e-10, atol=1e-10
    )


@EXAMPLES
@given(some_rows, seeds)
def test_gradients_are_orthogonal_to_what_changes_nothing(
    shape: tuple[int, int, int], seed: int
) -> None:
    """dx sums to 0 over a row, as a shift changes nothing, and dx * x, as a scale does not."""
    x, *parameters = inputs_of(shape, seed, dtype=torch.float64)
    assume(x.std(-1).min() > 0.1)
    x.requires_grad_()
    y = fn.fused_layernorm_linear(x, *parameters, 0.0)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    size = dx.abs().sum(-1).clamp_min(1.0)
    assert (dx.sum(-1).abs() / size).max() < 1e-11
    assert ((dx * x).sum(-1).abs() / size).max() < 1e-10


@EXAMPLES
@given(sizes, seeds)
def test_parameter_gradients_hang_together(shape: tuple[int, int, int], seed: int) -> None:
    """dgamma is the column sum of W * (dW - db x beta) / gamma, and dbeta is W^T db."""
    inputs = inputs_of(shape, seed, dtype=torch.float64, requires_grad=True)
    y = fn.fused_layernorm_linear(*inputs)
    y.backward(torch.randn_like(y))
    _, gamma, beta, weight, bias = inputs
    with torch.no_grad():
        inner = (weight.grad - bias.grad[:, None] * beta) / gamma
        torch.testing.assert_close(gamma.grad, (weight * inner).sum(0), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(beta.grad, bias.grad @ weight, rtol=1e-9, atol=1e-9)


@EXAMPLES
@given(sizes, seeds)
def test_backward_is_the_formula(shape: tuple[int, int, int], seed: int) -> None:
    inputs = inputs_of(shape, seed, dtype=torch.float64, requires_grad=True)
    y = fn.fused_layernorm_linear(*inputs)
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    expected = reference.layernorm_linear_backward(grad_output, *inputs[:4])
    for tensor, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-8, atol=1e-8)


@EXAMPLES
@given(sizes, seeds, dtypes, st.tuples(*[st.booleans()] * 3))
def test_any_shape_and_parameters(
    shape: tuple[int, int, int], seed: int, dtype: torch.dtype, given_: tuple[bool, ...]
) -> None:
    """Any shape, with any parameters left out, is within the budget of its dtype."""
    assume(shape[1] > 2)
    inputs = inputs_of(shape, seed, dtype=dtype)
    assume(inputs[0].double().std(-1).min() > 0.1)
    for index, is_given in zip((1, 2, 4), given_, strict=True):
        if not is_given:
            inputs[index] = None
    y = fn.fused_layernorm_linear(*inputs)
    exact = eager(*(t if t is None else t.double() for t in inputs))
    # Few numbers are a matter of luck: those of PyTorch may happen to be exact.
    assert_within_budget("y", y, exact, eager(*inputs), factor=4.0)


@EXAMPLES
@given(sizes, seeds, dtypes, st.data())
def test_strides_change_no_bit(
    shape: tuple[int, int, int], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """The same values wherever they are in memory: order, steps, offset of every tensor."""
    inputs = inputs_of(shape, seed, dtype=dtype)

    def moved(tensor: Tensor) -> Tensor:
        steps = data.draw(st.tuples(*[st.integers(1, 3)] * tensor.dim()))
        offset = data.draw(st.integers(0, 3))
        memory = torch.empty(
            [n * step + offset for n, step in zip(tensor.shape, steps, strict=True)]
        ).to(dtype)
        view = memory[tuple(slice(offset, None, step) for step in steps)]
        view = view[tuple(slice(0, n) for n in tensor.shape)]
        return view.copy_(tensor)

    expected = fn.fused_layernorm_linear(*inputs)
    assert torch.equal(fn.fused_layernorm_linear(*map(moved, inputs)), expected)


@EXAMPLES
@given(some_rows, seeds, dtypes)
def test_layer_norm_in_three_ops_is_one(
    shape: tuple[int, int, int], seed: int, dtype: torch.dtype
) -> None:
    x = inputs_of(shape, seed, dtype=dtype)[0]
    assume(x.double().std(-1).min() > 0.1)
    one = fn.trainable_eps_layer_norm(x, torch.zeros(1).to(x.dtype))
    three = fn.composed.layer_norm(x)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(one, three, rtol=tolerance, atol=tolerance)


SHAPES = [(16, 8, 16), (37, 50, 65), (199, 768, 96), (512, 1024, 1024)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.skipif(not shutil.which("mojo"), reason="no compiler for the CPU kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_and_gpu_agree(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = make_inputs(*shape, dtype=dtype, requires_grad=True)
    grad_output = torch.randn(shape[0], shape[2]).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.detach().to(device).requires_grad_() for t in inputs]
        y = fn.fused_layernorm_linear(*leaves)
        y.backward(grad_output.to(device))
        results.append([y.detach().cpu(), *(t.grad.cpu() for t in leaves)])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for mine, other in zip(*results, strict=True):
        assert relative(mine.float(), other.float()) < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "features"), [(64, 4096), (4096, 1024), (1000, 768)])
def test_fused_and_composed_agree(rows: int, features: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(rows, features, features, dtype=dtype, device="cuda")
    ys = []
    for strategy in (record.FUSED, record.NEW_FOLD, record.AROUND_PRODUCTS):
        with hopper_goes(strategy):
            ys.append(fn.fused_layernorm_linear(*inputs))
    for mine, other in itertools.pairwise(ys):
        assert relative(mine.float(), other.float()) < 8e-3
