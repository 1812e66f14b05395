"""trainable_eps_layer_norm and the composed ops against PyTorch: values, gradients, errors."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_copies, as_float64, assert_within_budget
from processes import assert_same_after_a_fork
from row_ops import OPS, SCALE, Op
from torch import Tensor

import fused_norm as fn
from fused_norm.ops import node, validation

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [
    (16, 8),
    (37, 50),  # nothing divides
    (1, 1023),  # one row
    (70, 769),
    (4096, 64),  # many rows: exercises the sum over rows
    (3, 8192),
    (2, 40001),  # longer than what a GPU's registers hold
    (24,),
    (2, 1, 3, 16),
]


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> Op:
    return OPS[request.param]


def skip_without_kernel(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("float64 has no GPU kernel")


def check(op: Op, inputs: list[Tensor]) -> None:
    """Compare the output and the gradients with float64, and hold them to PyTorch's errors."""
    ours, theirs, truth = as_copies(inputs), as_copies(inputs), as_float64(inputs)
    y, bar, exact = op.call(*ours), op.formula(*theirs), op.formula(*truth)
    assert_within_budget("y", y, exact, bar)
    assert y.is_contiguous()
    # A sum that cancels leaves one number of noise for a row's gradient of the norm.
    grad_output = (torch.randn_like(exact) + (op.names == ("v",))).to(y.dtype)
    y.backward(grad_output)
    bar.backward(grad_output)
    exact.backward(grad_output.double())
    for name, mine, low, high in zip(op.names, ours, theirs, truth, strict=True):
        # A single number may be right by luck: the gradient of o has a test of its own.
        if name != "o":
            assert_within_budget(f"grad_{name}", mine.grad, high.grad, low.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(
    op: Op, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    skip_without_kernel(device, dtype)
    check(op, op.inputs(shape, dtype=dtype, device=device, requires_grad=True))


@pytest.mark.parametrize("mean", [10, 1000])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_large_means(mean: float, dtype: torch.dtype, device: str) -> None:
    for name in ("trainable_eps", "layer_norm", "mean"):
        op = OPS[name]
        check(op, op.inputs((64, 512), dtype=dtype, device=device, mean=mean, requires_grad=True))


@pytest.mark.parametrize("o_dtype", [None, torch.float32], ids=["same o", "float32 o"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 700])
def test_gradient_of_o(
    rows: int, dtype: torch.dtype, o_dtype: torch.dtype | None, device: str
) -> None:
    skip_without_kernel(device, dtype)
    if o_dtype is not None and dtype is torch.float64:
        pytest.skip("the kernels take float64 alone")
    op, found = OPS["trainable_eps"], ([], [], [])
    for scale in torch.linspace(-2, 2, 24):
        x, o = op.inputs((rows, 130), dtype=dtype, device=device)
        o = scale.to(device, o_dtype or dtype).reshape(1).requires_grad_()
        # Not in the way of y, so that the sum is not one of noise.
        grad_output = torch.randn_like(x) + x
        # PyTorch would compute everything in float32 with a float32 o.
        narrow = o.detach().to(dtype).requires_grad_()
        exact = o.detach().double().requires_grad_()
        op.call(x, o).backward(grad_output)
        op.formula(x, narrow).backward(grad_output)
        op.formula(x.double(), exact).backward(grad_output.double())
        assert o.grad.dtype is o.dtype
        assert o.grad.shape == (1,)
        for gradients, tensor in zip(found, (o, narrow, exact), strict=True):
            gradients.append(tensor.grad)
    mine, low, high = (torch.cat(gradients) for gradients in found)
    assert_within_budget("grad_o", mine, high, low.to(mine.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_o(dtype: torch.dtype, device: str) -> None:
    (x, _), o = OPS["trainable_eps"].inputs((70, 96), dtype=dtype, device=device), SCALE
    y = fn.trainable_eps_layer_norm(x, torch.tensor([o], device=device))
    assert y.dtype is dtype
    # 0.25 is the same number in every dtype.
    assert torch.equal(
        y, fn.trainable_eps_layer_norm(x, torch.tensor([o], device=device).to(dtype))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_layer_norm(dtype: torch.dtype, device: str) -> None:
    """The fused one is F.layer_norm with o * o for eps; with an o of 0 it is the composed one."""
    skip_without_kernel(device, dtype)
    x, o = OPS["trainable_eps"].inputs((70, 300), dtype=dtype, device=device, requires_grad=True)
    grad_output = torch.randn_like(x)

    def run(function: object, tensor: Tensor) -> tuple[Tensor, Tensor]:
        leaf = tensor.detach().clone().requires_grad_()
        y = function(leaf)
        return y, torch.autograd.grad(y, leaf, grad_output.to(y.dtype))[0]

    zero = torch.zeros_like(o)
    for fused, other, eps in (
        (lambda x: fn.trainable_eps_layer_norm(x, o), None, SCALE**2),
        (lambda x: fn.trainable_eps_layer_norm(x, zero), fn.composed.layer_norm, 0.0),
    ):
        exact = run(lambda x, eps=eps: F.layer_norm(x, (300,), eps=eps), x.double())
        pytorch = run(lambda x, eps=eps: F.layer_norm(x, (300,), eps=eps), x)
        for name, mine, high, low in zip(("y", "dx"), run(fused, x), exact, pytorch, strict=True):
            assert_within_budget(name, mine, high, low)
        if other is not None:
            # Three ops round in between, as PyTorch's would.
            bar = run(OPS["layer_norm"].formula, x)
            for name, mine, high, low in zip(("y", "dx"), run(other, x), exact, bar, strict=True):
                assert_within_budget(f"composed {name}", mine, high, low)


def test_constant_rows(device: str) -> None:
    """0 / 0 is NaN, in its row alone, and 0 / o is 0; the gradient of o is 0 where o is."""
    x = torch.randn(4, 100, device=device)
    x[1] = 3.7
    zero, o = torch.zeros(1, device=device), torch.tensor([0.5], device=device)
    constant = torch.arange(4) == 1
    for y in (fn.trainable_eps_layer_norm(x, zero), fn.composed.layer_norm(x)):
        assert y[constant].isnan().all()
        assert torch.isfinite(y[~constant]).all()
    assert not fn.trainable_eps_layer_norm(x, o)[constant].any()
    zero.requires_grad_()
    fn.trainable_eps_layer_norm(x[~constant], zero).square().sum().backward()
    assert not zero.grad.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(bad: float, device: str) -> None:
    for name in ("trainable_eps", "layer_norm"):
        inputs = OPS[name].inputs((40, 100), device=device)
        clean = OPS[name].call(*inputs)
        inputs[0][7, 3] = bad
        y, others = OPS[name].call(*inputs), torch.arange(40) != 7
        assert y[7].isnan().all()
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (2, 0, 3), (0,)], ids=str)
def test_empty(op: Op, shape: tuple[int, ...], device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = op.inputs(shape, device=device, requires_grad=True)
        y = op.call(*inputs)
        assert y.shape == shape
        y.sum().backward()
    for tensor in inputs:
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


@pytest.mark.parametrize(
    "layout", ["transposed", "sliced", "strided", "misaligned", "expanded", "negative view"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(op: Op, layout: str, dtype: torch.dtype, device: str) -> None:
    def varied(x: Tensor) -> Tensor:
        rows, length = x.shape
        wide = torch.cat([x, x + 1], 1)
        return {
            "transposed": x.t().contiguous().t(),
            "sliced": wide[:, length:],
            "strided": wide[:, ::2],
            "misaligned": torch.cat([x.flatten(), x[0]])[3 : 3 + x.numel()].view(rows, length),
            "expanded": x[:1].expand(rows, length),
            "negative view": torch._neg_view(x),
        }[layout]

    def run(inputs: list[Tensor], grad_output: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = op.call(*leaves)
        return [y, *torch.autograd.grad(y, leaves, grad_output)]

    inputs = op.inputs((20, 24), dtype=dtype, device=device)
    unusual = [t if t.numel() == 1 else varied(t) for t in inputs]
    if layout == "negative view":
        unusual = [torch._neg_view(-t) for t in inputs]
    dense = [t.resolve_neg().clone(memory_format=torch.contiguous_format) for t in unusual]
    grad_output = varied(torch.randn(20, 24, device=device).to(dtype))
    # A GPU reads a misaligned row one element at a time, and so adds it up in another order.
    close = layout == "misaligned" and device == "cuda"
    for mine, other in zip(run(unusual, grad_output), run(dense, grad_output.clone()), strict=True):
        if close:
            torch.testing.assert_close(mine, other)
        else:
            assert torch.equal(mine, other)


def test_accumulates_into_gradients(op: Op, device: str) -> None:
    inputs = op.inputs((20, 24), device=device, requires_grad=True)
    y = op.call(*inputs)
    grad_output = torch.randn_like(y)
    once = torch.autograd.grad(y, inputs, grad_output, retain_graph=True)
    before = [torch.randn_like(t) for t in inputs]
    for tensor, gradient in zip(inputs, before, strict=True):
        tensor.grad = gradient.clone()
    y.backward(grad_output)
    for tensor, first, second in zip(inputs, before, once, strict=True):
        torch.testing.assert_close(tensor.grad, first + second)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["trainable_eps", "div"])
def test_gradients_of_some(name: str, wanted: tuple[bool, bool], device: str) -> None:
    op = OPS[name]
    inputs = op.inputs((20, 24), device=device)
    grad_output = torch.randn(20, 24, device=device)
    both, some = as_copies(inputs), as_copies(inputs)
    for tensor, required in zip(some, wanted, strict=True):
        tensor.requires_grad_(required)
    op.call(*(t.requires_grad_() for t in both)).backward(grad_output)
    op.call(*some).backward(grad_output)
    for mine, other, required in zip(some, both, wanted, strict=True):
        assert (mine.grad is not None) == required
        assert mine.grad is None or torch.equal(mine.grad, other.grad)


def _results(op: Op, inputs: list[Tensor], grad_output: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = op.call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_output)]


def test_same_bits_every_time(op: Op, device: str) -> None:
    inputs, grad_output = op.inputs((500, 300), device=device), torch.randn(500, 300, device=device)
    first = _results(op, inputs, grad_output)
    for _ in range(4):
        for mine, other in zip(_results(op, inputs, grad_output), first, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_threads_do_not_change_bits(op: Op, count: int) -> None:
    inputs, grad_output = op.inputs((501, 300)), torch.randn(501, 300)
    expected, before = _results(op, inputs, grad_output), torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        results = _results(op, inputs, grad_output)
    finally:
        torch.set_num_threads(before)
    for mine, other in zip(results, expected, strict=True):
        assert torch.equal(mine, other)


def test_after_a_fork() -> None:
    """A child has no threads but its own, whatever PyTorch's setting says."""
    setup = """
    x, o = torch.randn(512, 256, requires_grad=True), torch.ones(1, requires_grad=True)
    grad_output = torch.randn(512, 256)

    def step():
        y = fn.trainable_eps_layer_norm(x, o)
        return [y, *torch.autograd.grad(y, (x, o), grad_output), fn.composed.layer_norm(x)]
    """
    assert_same_after_a_fork(setup, "step()")


_X = torch.randn(4, 8)
_O = torch.tensor([SCALE])
ERRORS = {
    "list x": (
        lambda: fn.trainable_eps_layer_norm([1.0], _O),
        lambda: torch.mean([1.0], -1, keepdim=True),
    ),
    "no o": (lambda: fn.trainable_eps_layer_norm(_X, None), lambda: torch.square(None)),
    "integers": (
        lambda: fn.trainable_eps_layer_norm(_X.long(), _O),
        lambda: torch.mean(_X.long(), -1),
    ),
    "long o": (lambda: fn.trainable_eps_layer_norm(_X, _X[0]), lambda: _X[0].item()),
    "empty o": (lambda: fn.trainable_eps_layer_norm(_X, _O[:0]), lambda: _O[:0].item()),
    "integer mean": (lambda: fn.composed.mean(_X.long()), lambda: torch.mean(_X.long(), -1)),
    "norm of a number": (lambda: fn.composed.norm(3.0), lambda: torch.square(3.0)),
    "no dividend": (lambda: fn.composed.div(None, _X), lambda: torch.div(None, _X)),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_pytorchs(case: str) -> None:
    ours, theirs = ERRORS[case]
    with pytest.raises((RuntimeError, TypeError)) as expected:
        theirs()
    with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$"):
        ours()


def test_div_broadcasts_nothing() -> None:
    message = re.escape("to have same size as tensor for argument #2 'b'; but [4, 8] does not")
    for other in (_X[:1], _X[0], _X[:, :1], torch.tensor(2.0)):
        with pytest.raises(RuntimeError, match=message):
            fn.composed.div(_X, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_without_a_kernel(op: Op, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's ops give the same, in the same dtype, and it is said once."""
    inputs = op.inputs((20, 24), dtype=dtype)
    expected = op.call(*inputs)
    monkeypatch.setattr(validation, "serves", lambda x, dtype: False)
    # The compiled node keeps the kernel of the call before.
    monkeypatch.setattr(node, "module", lambda: None)
    validation._say_once.cache_clear()
    with pytest.warns(UserWarning, match=rf"no kernels for {dtype} on cpu") as said:
        results = [op.call(*inputs) for _ in range(2)]
    assert len(said) == 1
    for y in results:
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("shape", [(), (1, 1)], ids=str)
def test_any_shape_of_one_element(shape: tuple[int, ...], device: str) -> None:
    x, o = OPS["trainable_eps"].inputs((5, 8), device=device)
    scalar = o.reshape(shape).requires_grad_()
    y = fn.trainable_eps_layer_norm(x, scalar)
    assert torch.equal(y, fn.trainable_eps_layer_norm(x, o))
    y.square().sum().backward()
    assert scalar.grad.shape == shape


def test_mixed_dtypes_are_pytorchs() -> None:
    x, o = OPS["trainable_eps"].inputs((5, 8))
    y = fn.trainable_eps_layer_norm(x, o.double())
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, fn.trainable_eps_layer_norm(x, o))
    assert fn.composed.div(x, x.double()).shape == x.shape
