"""fused_layernorm_linear against PyTorch: values, gradients, shapes, layouts, errors."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from accuracy import NAMES, as_copies, as_float64, assert_within_budget, check, eager, make_inputs
from torch import Tensor

import fused_norm as fn

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [
    (16, 8, 16),  # the puzzle's
    (37, 50, 65),  # nothing divides
    (1, 1023, 7),  # one row
    (199, 768, 96),
    (4096, 64, 32),  # many rows: exercises partial sums
    (5, 1, 3),  # one feature: every output is the bias
    (3, 7, 1),
    (70, 769, 300),
]


def skip_without_kernel(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("float64 has no GPU kernel")


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert equal bits, but on a GPU, where cuBLAS chooses its kernel by layout and alignment."""
    if actual.is_cuda:
        torch.testing.assert_close(actual, expected)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    skip_without_kernel(device, dtype)
    check(make_inputs(*shape, dtype=dtype, device=device, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_layernorm_parameters(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(
        70, 96, 40, dtype=dtype, device=device, affine_dtype=torch.float32, requires_grad=True
    )
    # PyTorch's CPU backward wants one dtype, so the parameters' gradients are compared in theirs.
    ours, truth = as_copies(inputs), as_float64(inputs)
    y, exact = fn.fused_layernorm_linear(*ours), eager(*truth)
    low = [t.detach().to(dtype).requires_grad_() for t in inputs]
    bar = eager(*low)
    assert_within_budget("y", y, exact, bar)
    grad_output = torch.randn_like(exact).to(dtype)
    for result, gradient in ((y, grad_output), (exact, grad_output.double()), (bar, grad_output)):
        result.backward(gradient)
    for name, mine, theirs, high in zip(NAMES, ours, low, truth, strict=True):
        assert mine.grad.dtype == mine.dtype
        assert_within_budget(
            f"grad_{name}", mine.grad, high.grad, theirs.grad.to(mine.dtype), factor=2.0
        )


@pytest.mark.parametrize("missing", list(itertools.product([False, True], repeat=3)), ids=str)
def test_missing_parameters(missing: tuple[bool, ...], device: str) -> None:
    inputs = make_inputs(37, 50, 65, device=device, requires_grad=True)
    for index, is_missing in zip((1, 2, 4), missing, strict=True):
        if is_missing:
            inputs[index] = None
    check(inputs)


@pytest.mark.parametrize("subset", list(itertools.product([False, True], repeat=5)), ids=str)
def test_gradients_of_any_subset(subset: tuple[bool, ...], device: str) -> None:
    inputs = make_inputs(16, 8, 16, device=device)
    for tensor, required in zip(inputs, subset, strict=True):
        tensor.requires_grad_(required)
    check(inputs)
    copies = as_copies(inputs)
    y = fn.fused_layernorm_linear(*copies)
    assert y.requires_grad == any(subset)
    if any(subset):
        y.sum().backward()
    assert [t.grad is not None for t in copies] == list(subset)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3, 2), (0,), (4, 0), (1, 1)], ids=str)
def test_leading_shapes(leading: tuple[int, ...], device: str) -> None:
    inputs = make_inputs(leading, 24, 10, device=device, requires_grad=True)
    check(inputs)
    y = fn.fused_layernorm_linear(*inputs)
    assert y.shape == (*leading, 10)


@pytest.mark.parametrize(("features", "outputs"), [(0, 5), (8, 0), (0, 0)])
def test_empty_features_and_outputs(features: int, outputs: int, device: str) -> None:
    inputs = make_inputs(4, features, outputs, device=device, requires_grad=True)
    ours, theirs = as_copies(inputs), as_copies(inputs)
    y, expected = fn.fused_layernorm_linear(*ours), eager(*theirs)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def _layouts(x: Tensor) -> dict[str, Tensor]:
    rows, features = x.shape
    wide = torch.randn(rows, 2 * features, dtype=x.dtype, device=x.device)
    flat = torch.randn(rows * features + 3, dtype=x.dtype, device=x.device)
    return {
        "transposed": x.t().contiguous().t(),
        "sliced": wide[:, features:],
        "strided": wide[:, ::2],
        "misaligned": flat[3:].view(rows, features),
        "expanded": x[:1].expand(rows, features),
        "negative view": torch._neg_view(x),
    }


@pytest.mark.parametrize(
    "layout", ["transposed", "sliced", "strided", "misaligned", "expanded", "negative view"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    x, gamma, beta, weight, bias = make_inputs(20, 24, 24, dtype=dtype, device=device)
    varied_x, varied_w = _layouts(x)[layout], _layouts(weight[:20])[layout]
    with torch.no_grad():
        y = fn.fused_layernorm_linear(varied_x, gamma, beta, varied_w, bias[:20])
        dense = [
            t.resolve_neg().clone(memory_format=torch.contiguous_format)
            for t in (varied_x, varied_w)
        ]
        expected = fn.fused_layernorm_linear(dense[0], gamma, beta, dense[1], bias[:20])
    if layout == "transposed" or (layout == "sliced" and dtype is torch.bfloat16):
        # PyTorch's product takes such a weight as it is, and may choose another kernel for it.
        inputs = [varied_x, gamma, beta, varied_w, bias[:20]]
        assert_within_budget("y", y, eager(*as_float64(inputs)), eager(*inputs))
        if dtype is torch.float32:
            torch.testing.assert_close(y, expected)
    else:
        assert_same(y, expected)
    assert y.is_contiguous()


def test_gradient_through_a_view(device: str) -> None:
    base = torch.randn(24, 40, device=device, requires_grad=True)
    _, gamma, beta, weight, bias = make_inputs(1, 24, 10, device=device)
    fn.fused_layernorm_linear(base.t(), gamma, beta, weight, bias).square().sum().backward()
    mine, base.grad = base.grad, None
    eager(base.t(), gamma, beta, weight, bias).square().sum().backward()
    torch.testing.assert_close(mine, base.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_grad_output_layouts(kind: str, device: str) -> None:
    inputs = make_inputs(30, 20, 30, device=device, requires_grad=True)
    base = torch.randn(30, 30, device=device)
    grad_output = base[:1].expand(30, 30) if kind == "expanded" else base.t()
    ours, theirs = as_copies(inputs), as_copies(inputs)
    fn.fused_layernorm_linear(*ours).backward(grad_output)
    fn.fused_layernorm_linear(*theirs).backward(grad_output.contiguous())
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("mean", [1, 10, 100, 1000])
def test_large_means(mean: float, dtype: torch.dtype, device: str) -> None:
    check(make_inputs(64, 512, 64, dtype=dtype, device=device, mean=mean, requires_grad=True))


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e4, 1e8])
def test_constant_rows_give_the_bias(value: float, device: str) -> None:
    _, gamma, beta, weight, bias = make_inputs(1, 100, 10, device=device)
    x = torch.full((3, 100), value, device=device)
    y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    expected = fn.fused_layernorm_linear(torch.zeros_like(x), gamma, beta, weight, bias)
    assert torch.equal(y, expected)
    torch.testing.assert_close(y, F.linear(beta, weight, bias).expand_as(y))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_in_their_row(bad: float, device: str) -> None:
    inputs = make_inputs(40, 100, 30, device=device)
    clean = fn.fused_layernorm_linear(*inputs)
    inputs[0][7, 3] = bad
    y = fn.fused_layernorm_linear(*inputs)
    assert y[7].isnan().all()
    others = torch.arange(40) != 7
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("eps", [0.0, 0.5, -0.5, float("inf"), float("nan"), 1])
def test_eps(eps: float, device: str) -> None:
    inputs = make_inputs(10, 30, 8, device=device)
    y, expected = fn.fused_layernorm_linear(*inputs, eps), eager(*inputs, eps)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_same_bits_every_time(device: str) -> None:
    inputs = make_inputs(500, 300, 200, device=device, requires_grad=True)
    grad_output = torch.randn(500, 200, device=device)
    first = None
    for _ in range(5):
        copies = as_copies(inputs)
        y = fn.fused_layernorm_linear(*copies)
        y.backward(grad_output)
        results = [y.detach(), *(t.grad for t in copies)]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    if device == "cuda":
        pytest.skip("cuBLAS chooses its kernel by the number of rows")
    inputs = make_inputs(130, 300, 200)
    whole = fn.fused_layernorm_linear(*inputs)
    for rows in (1, 5, 64):
        part = fn.fused_layernorm_linear(inputs[0][:rows], *inputs[1:])
        assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_threads_do_not_change_bits(count: int) -> None:
    inputs = make_inputs(500, 300, 200, requires_grad=True)
    grad_output = torch.randn(500, 200)

    def run() -> list[Tensor]:
        copies = as_copies(inputs)
        y = fn.fused_layernorm_linear(*copies)
        y.backward(grad_output)
        return [y.detach(), *(t.grad for t in copies)]

    expected, before = run(), torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        results = run()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))


def _error_cases() -> dict[str, tuple[object, ...]]:
    x, gamma, beta, weight, bias = make_inputs(4, 8, 16)
    return {
        "features": (torch.randn(4, 7), gamma, beta, weight, bias),
        "scalar": (torch.tensor(1.0), gamma, beta, weight, bias),
        "gamma shape": (x, gamma[:7], beta, weight, bias),
        "gamma rank": (x, gamma[None], beta, weight, bias),
        "beta shape": (x, gamma, beta[:7], weight, bias),
        "features without affine": (torch.randn(4, 7), None, None, weight, bias),
        "weight shape": (x, gamma, beta, torch.randn(16, 7), bias),
        "weight rank": (x, gamma, beta, torch.randn(2, 16, 8), bias),
        "bias shape": (x, gamma, beta, weight, bias[:15]),
        "1-d weight with bias": (x, gamma, beta, weight[0], bias[:1]),
        "float64 x": (x.double(), gamma, beta, weight, bias),
        "integer x": (x.long(), gamma, beta, weight, bias),
        "integers": tuple(t.long() for t in (x, gamma, beta, weight, bias)),
        "bool x": (x > 0, None, None, weight, bias),
        "complex": tuple(t.to(torch.complex64) for t in (x, gamma, beta, weight, bias)),
        "bf16 gamma": (x, gamma.bfloat16(), beta.bfloat16(), weight, bias),
        "unlike gamma and beta": (x, gamma, beta.double(), weight, bias),
        "bf16 weight": (x, gamma, beta, weight.bfloat16(), bias.bfloat16()),
        "bf16 x": (x.bfloat16(), gamma, beta, weight, bias),
        "float64 bias": (x, gamma, beta, weight, bias.double()),
        "meta x": (x.to("meta"), gamma, beta, weight, bias),
        "no x": (None, gamma, beta, weight, bias),
        "list x": ([1.0, 2.0], gamma, beta, weight, bias),
        "no weight": (x, gamma, beta, None, bias),
        "eps of None": (x, gamma, beta, weight, bias, None),
        "eps of str": (x, gamma, beta, weight, bias, "1e-5"),
        "sparse x": (x.to_sparse(), gamma, beta, weight, bias),
    }


@pytest.mark.parametrize("case", _error_cases())
def test_errors_are_pytorchs(case: str) -> None:
    arguments = _error_cases()[case]
    x, gamma, beta, weight, bias, *eps = arguments
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)) as expected:
        F.linear(F.layer_norm(x, (8,), gamma, beta, *eps), weight, bias)
    with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$"):
        fn.fused_layernorm_linear(*arguments)


@pytest.mark.parametrize("shape", [(1,), (), (1, 16)], ids=str)
def test_bias_that_broadcasts(shape: tuple[int, ...]) -> None:
    x, gamma, beta, weight, _ = make_inputs(4, 8, 16)
    bias = torch.randn(shape)
    y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    torch.testing.assert_close(y, eager(x, gamma, beta, weight, bias))


def test_weight_vector() -> None:
    x, gamma, beta, weight, _ = make_inputs(4, 8, 16)
    y = fn.fused_layernorm_linear(x, gamma, beta, weight[0])
    torch.testing.assert_close(y, eager(x, gamma, beta, weight[0], None))


def test_parameter_gives_a_plain_tensor() -> None:
    x, *parameters = make_inputs(4, 8, 16)
    y = fn.fused_layernorm_linear(torch.nn.Parameter(x), *parameters)
    assert type(y) is Tensor


def test_changed_input_is_an_error() -> None:
    inputs = make_inputs(4, 8, 16)
    inputs[3].requires_grad_()
    y = fn.fused_layernorm_linear(*inputs)
    inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice_and_accumulation(device: str) -> None:
    inputs = make_inputs(4, 8, 16, device=device, requires_grad=True)
    y = fn.fused_layernorm_linear(*inputs)
    grad_output = torch.randn_like(y)
    y.backward(grad_output, retain_graph=True)
    once = [t.grad.clone() for t in inputs]
    y.backward(grad_output)
    for tensor, gradient in zip(inputs, once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(grad_output)


def test_no_warning_where_there_is_a_kernel() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn.fused_layernorm_linear(*make_inputs(4, 8, 16))
