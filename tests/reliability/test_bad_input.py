"""A fuzzer of wrong calls: PyTorch's error or PyTorch's result, never a crash, nothing launched."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accuracy import NAMES, make_inputs
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.composition import Operands, Spec
from fused_norm.ops import norm_linear_ops
from fused_norm.ops.operands import as_kernels_need

K, N = 8, 16
pytestmark = [
    # PyTorch's own, about layouts, and ours, about dtypes without a kernel.
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*[Nn]ested [Tt]ensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:fused_norm has no kernels:UserWarning"),
]


class Plain(Tensor):
    """A subclass that changes nothing."""


def nested(tensor: Tensor) -> Tensor:
    return torch.nested.nested_tensor([tensor, tensor])


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "same": lambda t: t,
    "none": lambda t: None,
    "shorter": lambda t: t[..., :-1],
    "longer": lambda t: torch.cat([t, t], -1),
    "one more dimension": lambda t: t[None],
    "first row": lambda t: t[0],
    "empty": lambda t: t[..., :0],
    "no rows": lambda t: t[:0],
    "scalar": lambda t: torch.tensor(1.0),
    "transposed": lambda t: t.mT if t.dim() > 1 else t,
    "expanded": lambda t: t[:1].expand(t.shape),
    "one element": lambda t: t.flatten()[:1],
    "float64": lambda t: t.double(),
    "bfloat16": lambda t: t.bfloat16(),
    "float16": lambda t: t.half(),
    "int64": lambda t: t.long(),
    "int8": lambda t: t.to(torch.int8),
    "bool": lambda t: t > 0,
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr() if t.dim() == 2 else t.to_sparse(),
    "nested": nested,
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "negative view": lambda t: torch._neg_view(t),
    "conjugate": lambda t: t.to(torch.complex64).conj().imag,
    "parameter": lambda t: nn.Parameter(t),
    "subclass": lambda t: t.as_subclass(Plain),
    "needs gradient": lambda t: t.clone().requires_grad_(),
    "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "number": lambda t: 1.0,
    "text": lambda t: "tensor",
    "class": lambda t: Tensor,
    "numpy float": lambda t: np.float32(1),
}
EPS = [1e-5, 0, 1, 0.5, -1.0, None, "1e-5", [1e-5], torch.tensor(1e-5), True, 1j, np.float64(1e-5)]


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns or raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*arguments)
        except Exception as error:
            # Whatever it is: the caller compares its type and words with PyTorch's.
            return error


def pytorchs(shape: tuple[int, ...], arguments: list[Any]) -> Any:
    x, gamma, beta, weight, bias, eps = arguments
    return outcome(lambda: F.linear(F.layer_norm(x, shape, gamma, beta, eps), weight, bias))


def words(error: Exception) -> str:
    """Return the first line of an error, without what differs from call to call."""
    return re.sub(r"0x[0-9a-f]+", "", (str(error).splitlines() or [""])[0])


def assert_alike(mine: Tensor, other: Tensor) -> None:
    assert type(mine) is type(other)
    if other.is_nested:
        torch.testing.assert_close(mine.unbind(), other.unbind(), equal_nan=True)
        return
    assert (mine.shape, mine.dtype, mine.layout) == (other.shape, other.dtype, other.layout)
    assert (mine.device, mine.requires_grad) == (other.device, other.requires_grad)
    if not mine.is_meta and mine.layout is torch.strided:
        rounding = 8 * torch.finfo(mine.dtype).eps if mine.dtype.is_floating_point else 0
        torch.testing.assert_close(mine, other, rtol=rounding, atol=8 * rounding, equal_nan=True)


def compare(arguments: list[Any]) -> bool:
    """Compare a call with PyTorch's and return whether it was an error."""
    mine = outcome(fn.fused_layernorm_linear, *arguments)
    # PyTorch is told a shape to normalize: what the input, the weight or gamma says, or the right.
    shapes = [(K,)]
    for tensor in (arguments[1], arguments[3], arguments[0]):
        if isinstance(tensor, Tensor) and not tensor.is_nested:
            shapes.insert(0, tuple(tensor.shape[-1:]))
    expected = [pytorchs(shape, arguments) for shape in shapes]
    if isinstance(mine, Exception):
        errors = [e for e in expected if isinstance(e, Exception)]
        assert isinstance(expected[0], Exception), f"{mine!r}, where PyTorch gives a result"
        assert (type(mine), words(mine)) in [(type(e), words(e)) for e in errors], (mine, errors)
        return True
    assert not isinstance(expected[0], Exception), f"no error, PyTorch: {expected[0]!r}"
    assert_alike(mine, expected[0])
    return False


@pytest.fixture
def launches(watch: Callable[..., list[Any]]) -> list[Any]:
    """What was handed to kernels."""
    return watch(norm_linear_ops, "forward")


def called_with(changes: dict[str, str], eps: Any = 1e-5) -> list[Any]:
    inputs = dict(zip(NAMES, make_inputs(4, K, N), strict=True))
    for name, change in changes.items():
        inputs[name] = CHANGES[change](inputs[name])
    return [*inputs.values(), eps]


def possible(changes: dict[str, str]) -> bool:
    """Return whether PyTorch can make such arguments at all."""
    return not isinstance(outcome(called_with, changes), Exception)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_argument(name: str, change: str, launches: list[object]) -> None:
    if possible({name: change}) and compare(called_with({name: change})):
        assert not launches


@pytest.mark.parametrize("change", CHANGES)
def test_all_arguments_alike(change: str, launches: list[object]) -> None:
    changes = dict.fromkeys(NAMES, change)
    if possible(changes) and compare(called_with(changes)):
        assert not launches


@pytest.mark.parametrize("eps", EPS, ids=repr)
def test_eps(eps: Any, launches: list[object]) -> None:
    if compare(called_with({}, eps)):
        assert not launches


@pytest.mark.parametrize("seed", range(20))
def test_several_wrong_arguments(seed: int, launches: list[object]) -> None:
    """100 calls of each seed, with two to five arguments changed."""
    choose = random.Random(seed)
    for _ in range(100):
        names = choose.sample(NAMES, choose.randint(2, 5))
        changes = {name: choose.choice(list(CHANGES)) for name in names}
        eps = choose.choice(EPS) if choose.random() < 0.1 else 1e-5
        if not possible(changes):
            continue
        launches.clear()
        try:
            if compare(called_with(changes, eps)):
                assert not launches
        except AssertionError as error:
            raise AssertionError(f"{changes}, eps {eps!r}: {error}") from error


@pytest.mark.parametrize("number", [0, 1, 2, 7])
def test_wrong_number_of_arguments(number: int) -> None:
    with pytest.raises(TypeError, match="argument"):
        fn.fused_layernorm_linear(*make_inputs(4, K, N)[:number], *range(number - 5))


@pytest.mark.parametrize("change", ["shorter", "transposed", "float64", "meta", "none", "list"])
def test_wrong_grad_output(change: str) -> None:
    def backward(function: Callable[..., Tensor]) -> Any:
        inputs = [t.requires_grad_() for t in make_inputs(N, K, N)]
        torch.manual_seed(1)
        grad_output = CHANGES[change](torch.randn(N, N))
        result = outcome(function(*inputs).backward, grad_output)
        return result, [t.grad for t in inputs]

    torch.manual_seed(0)
    mine, my_gradients = backward(fn.fused_layernorm_linear)
    torch.manual_seed(0)
    other, gradients = backward(lambda x, g, b, w, lb: F.linear(F.layer_norm(x, (K,), g, b), w, lb))
    assert type(mine) is type(other)
    if isinstance(other, Exception):
        # The name of the graph's node is in some of the messages.
        assert words(mine).split("Backward")[0] == words(other).split("Backward")[0]
    for left, right in zip(my_gradients, gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("op", ["trainable_eps_layer_norm", "mean", "norm", "div", "layer_norm"])
def test_row_ops(op: str, change: str) -> None:
    """An exception, or the formula's result."""
    if not possible({"x": change}):
        pytest.skip("PyTorch has no such tensor")
    from fused_norm import reference

    x, other = called_with({"x": change})[0], torch.full((1,), 0.5)
    if op == "trainable_eps_layer_norm":
        mine = outcome(fn.trainable_eps_layer_norm, x, other)
        expected = outcome(reference.trainable_eps_layer_norm, x, other[0])
    elif op == "div":
        mine = outcome(fn.composed.div, x, x)
        expected = outcome(reference.div, x, x)
    else:
        mine = outcome(getattr(fn.composed, op), x)
        formula = "composed_layer_norm" if op == "layer_norm" else op
        expected = outcome(getattr(reference, formula), x)
    if isinstance(expected, Exception):
        assert isinstance(mine, Exception)
        assert type(mine) in (type(expected), TypeError, RuntimeError, NotImplementedError)
    elif isinstance(mine, Exception):
        raise mine
    elif not mine.is_nested and not mine.is_meta and mine.layout is torch.strided:
        dtype = mine.dtype
        rounding = 16 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
        torch.testing.assert_close(
            mine, expected.to(dtype), rtol=rounding, atol=rounding, equal_nan=True
        )


@pytest.mark.parametrize("sizes", [(-1, 4), (4, -1), ("4", 4), (4.0, 4), (None, 4)], ids=repr)
def test_module_sizes(sizes: tuple[Any, Any]) -> None:
    mine, other = outcome(fn.LayerNormLinear, *sizes), outcome(nn.Linear, *sizes)
    assert isinstance(other, Exception)
    assert type(mine) is type(other)


def test_validation_never_reads_values() -> None:
    """Looking at a call must not wait for a GPU: meta tensors have no values to read."""
    x, gamma, beta, weight, bias = (t.to("meta") for t in make_inputs(4, K, N))
    t = Operands(x, gamma=gamma, beta=beta, weights=[weight], biases=[bias])
    assert as_kernels_need(Spec(), t) is not None


@pytest.mark.parametrize("seed", range(10))
def test_wrong_inputs_after_right_ones(seed: int, launches: list[object]) -> None:
    """What is known of parameters from calls before must not let a wrong call through."""
    choose = random.Random(seed)
    x, *parameters = make_inputs(4, K, N)
    parameters = [nn.Parameter(t) for t in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(100):
            assert not compare([x, *parameters, 1e-5])
            kind = choose.random()
            if kind < 0.3:
                # Another shape, dtype or memory under the same Parameter.
                index = choose.randrange(4)
                values = parameters[index].data
                change = choose.choice(["same", "longer", "float64", "bfloat16", "expanded"])
                parameters[index].data = CHANGES[change](values.clone())
                compare([x, *parameters, 1e-5])
                parameters[index].data = values
            elif kind < 0.5:
                parameters[choose.randrange(4)].requires_grad_(choose.random() < 0.5)
            else:
                change = choose.choice(list(CHANGES))
                if possible({"x": change}):
                    compare([CHANGES[change](x), *parameters, choose.choice([1e-5, *EPS])])
