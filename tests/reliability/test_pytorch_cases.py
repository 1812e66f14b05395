"""PyTorch's own test cases of LayerNorm and of Linear, paired: OpInfo samples and module_db."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_copies, check, eager
from torch import Tensor, nn
from torch.testing import make_tensor

import fused_norm as fn

# It imports what PyTorch itself deprecates.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

# PyTorch's forward mode compiles its decompositions in a way that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OPS = {name: next(op for op in op_db if op.name == name) for name in (
    "nn.functional.layer_norm", "native_layer_norm", "nn.functional.linear"
)}  # fmt: skip
Case = tuple[list[Tensor | None], float]


def paired(name: str, dtype: torch.dtype, *, noncontiguous: bool = False) -> Iterator[Case]:
    """Yield the inputs and eps of each sample, with random parameters for its other half."""

    def parameter(*shape: int) -> Tensor:
        return make_tensor(shape, device="cpu", dtype=dtype, requires_grad=True)

    for sample in OPS[name].sample_inputs("cpu", dtype, requires_grad=True):
        if noncontiguous:
            sample = sample.noncontiguous()
        x, arguments = sample.input, list(sample.args)
        if name == "nn.functional.linear":
            weight, bias = [*arguments, None][:2]
            for affine in ((True, True), (True, False), (False, False)):
                vectors = [parameter(x.shape[-1]) if wanted else None for wanted in affine]
                yield [x, *vectors, weight, bias], 1e-5
            continue
        shape, gamma, beta, *eps = [*arguments, None, None][: max(3, len(arguments))]
        # Several normalized dimensions are one, flattened.
        x = x.flatten(-len(shape))
        gamma, beta = (t if t is None else t.flatten() for t in (gamma, beta))
        leaves = [t if t is None else t.detach().requires_grad_() for t in (x, gamma, beta)]
        eps = eps[0] if eps else sample.kwargs.get("eps", 1e-5)
        for bias in (None, parameter(3)):
            yield [*leaves, parameter(3, x.shape[-1]), bias], eps


def is_finite(inputs: list[Tensor | None], eps: float) -> bool:
    return bool(eager(*inputs, eps).isfinite().all())


def check_roughly(inputs: list[Tensor | None], eps: float) -> None:
    """Compare with PyTorch where its own error is no bar.

    An eps of -0.5 makes roots of negative numbers, and rows of one or two features cancel in the
    gradients: what remains is rounding, and is held to the size of the terms.
    """
    ours, theirs = as_copies(inputs), as_copies(inputs)
    y, expected = fn.fused_layernorm_linear(*ours, eps), eager(*theirs, eps)
    grad_output = torch.randn_like(expected)
    y.backward(grad_output)
    expected.backward(grad_output)
    x, gamma, _, weight, _ = (None if t is None else t.detach().double() for t in inputs)
    variance = x.var(-1, unbiased=False, keepdim=True) if x.numel() else x
    rstd = (variance + eps).rsqrt().nan_to_num()
    dz = grad_output.double()[..., None] @ weight[None] if weight.dim() == 1 else grad_output
    dz = dz.double().abs() @ weight.abs() if weight.dim() == 2 else dz.abs()
    terms = dz * (1 + x.abs() * rstd) * (1 + rstd) * (1 if gamma is None else 1 + gamma.abs())
    rounding = 8 * torch.finfo(y.dtype).eps
    atol = rounding * max(1.0, terms.sum().item())
    torch.testing.assert_close(y, expected, rtol=rounding, atol=atol, equal_nan=True)
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None:
            torch.testing.assert_close(
                mine.grad, other.grad, rtol=rounding, atol=atol, equal_nan=True
            )


@pytest.mark.parametrize("noncontiguous", [False, True], ids=["contiguous", "noncontiguous"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_samples(name: str, dtype: torch.dtype, noncontiguous: bool) -> None:
    for inputs, eps in paired(name, dtype, noncontiguous=noncontiguous):
        is_matrix = inputs[3].dim() == 2
        if is_matrix and inputs[0].shape[-1] > 2 and is_finite(inputs, eps):
            check(inputs, eps)
        else:
            check_roughly(inputs, eps)


@pytest.mark.parametrize("name", OPS)
def test_second_derivatives_of_samples(name: str) -> None:
    for inputs, eps in paired(name, torch.float64):
        if is_finite(inputs, eps):
            tensors = [t for t in inputs if t is not None]
            given = [t is not None for t in inputs]

            def call(*tensors: Tensor, given: list[bool] = given, eps: float = eps) -> Tensor:
                queue = iter(tensors)
                arguments = [next(queue) if is_given else None for is_given in given]
                return fn.fused_layernorm_linear(*arguments, eps)

            assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
            # A vanishing variance makes second differences of eps' size meaningless.
            if inputs[0].shape[-1] > 2:
                assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("name", OPS)
def test_forward_derivatives_of_samples(name: str) -> None:
    """Regression: under forward mode the op returned its value and silently lost the tangent."""
    for inputs, eps in paired(name, torch.float64):
        if not is_finite(inputs, eps):
            continue
        primals = [None if t is None else t.detach() for t in inputs]
        tangents = [None if t is None else torch.randn_like(t) for t in primals]
        with torch.autograd.forward_ad.dual_level():
            duals = [
                p if p is None else torch.autograd.forward_ad.make_dual(p, t)
                for p, t in zip(primals, tangents, strict=True)
            ]
            mine = torch.autograd.forward_ad.unpack_dual(fn.fused_layernorm_linear(*duals, eps))
            other = torch.autograd.forward_ad.unpack_dual(eager(*duals, eps))
        torch.testing.assert_close(mine.primal, other.primal)
        torch.testing.assert_close(mine.tangent, other.tangent)


@pytest.mark.parametrize("name", ["native_layer_norm"])
def test_error_inputs(name: str) -> None:
    """Where our signature can say the same wrong thing, the error is PyTorch's."""
    tried = 0
    for error in OPS[name].error_inputs("cpu"):
        sample = error.sample_input
        x, (shape, gamma, beta, eps) = sample.input, sample.args
        if not shape or tuple(shape) == x.shape[-len(shape) :]:
            # Flattened, since ours normalizes one dimension; its parameters keep their fault.
            x = x.flatten()[None]
        weight = torch.randn(3, shape[-1] if shape and gamma is beta is None else x.shape[-1])
        if gamma is beta is None and (not shape or shape[-1] == x.shape[-1]):
            continue  # a normalized_shape that ours does not take
        with pytest.raises(error.error_type) as expected:
            F.linear(F.layer_norm(x, weight.shape[-1:], gamma, beta, eps), weight)
        assert re.match(error.error_regex, str(expected.value))
        with pytest.raises(error.error_type, match=f"^{re.escape(str(expected.value))}$"):
            fn.fused_layernorm_linear(x, gamma, beta, weight, None, eps)
        tried += 1
    assert tried == 3


def modules(name: str, dtype: torch.dtype) -> Iterator[tuple[nn.Sequential, Tensor]]:
    """Yield a LayerNorm and a Linear, and what to call them with."""
    info = next(info for info in module_db if info.name == name)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=True
    )
    for sample in samples:
        arguments, options = sample.constructor_input.args, sample.constructor_input.kwargs
        x = make_tensor((4, 10), device="cpu", dtype=dtype, requires_grad=True)
        if sample.forward_input.args:
            x = sample.forward_input.args[0]
        if name == "nn.Linear":
            linear = nn.Linear(*arguments, **options, dtype=dtype)
            yield nn.Sequential(nn.LayerNorm(linear.in_features, dtype=dtype), linear), x
            continue
        shape, *rest = arguments
        x = x.detach().flatten(-len(shape)).requires_grad_()
        ln = nn.LayerNorm(x.shape[-1], *rest, **options, dtype=dtype)
        yield nn.Sequential(ln, nn.Linear(x.shape[-1], 3, dtype=dtype)), x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["nn.LayerNorm", "nn.Linear"])
def test_modules(name: str, dtype: torch.dtype) -> None:
    for sequential, x in modules(name, dtype):
        ln, linear = sequential
        layer = fn.LayerNormLinear.from_modules(ln, linear)
        check([x, ln.weight, ln.bias, linear.weight, linear.bias], ln.eps)
        y = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.eval()):
            assert torch.equal(other(x), y)
        for parameter, other in zip(layer.parameters(), sequential.parameters(), strict=True):
            assert parameter is other
        expected = sequential(x)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
