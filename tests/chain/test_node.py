"""Both passes in C++: as Python's with every strategy, but without Python where nothing watches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from accuracy import as_copies, make_inputs
from node_calls import LAYOUTS, assert_as_python, from_python, inputs_for
from torch import Tensor

import fused_norm as fn
from fused_norm.ops import norm_linear_ops


@pytest.fixture
def python_forwards(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record the inputs whose forward runs in Python."""
    calls: list[Tensor] = []
    run = norm_linear_ops.forward

    def forward(x: Tensor, *others: object) -> object:
        calls.append(x)
        return run(x, *others)

    monkeypatch.setattr(norm_linear_ops, "forward", forward)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 16), (300, 200, 90)], ids=str)
def test_same_bits_without_python(
    shape: tuple[int, ...], dtype: torch.dtype, python_calls: list[Tensor]
) -> None:
    inputs = make_inputs(*shape, dtype=dtype, requires_grad=True)
    assert_as_python(inputs, torch.randn(shape[0], shape[2]).to(dtype))
    assert not python_calls


def test_float32_layernorm_parameters(python_calls: list[Tensor]) -> None:
    options = {"dtype": torch.float16, "affine_dtype": torch.float32, "requires_grad": True}
    assert_as_python(make_inputs(33, 24, 40, **options), torch.randn(33, 40).half())
    assert not python_calls


def test_forward_without_python(
    python_calls: list[Tensor], python_forwards: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    for x in (inputs[0], inputs[0].reshape(2, 1, 8, 8), inputs[0][0]):
        python_forwards.clear()
        y = fn.fused_layernorm_linear(x, *inputs[1:])
        assert not python_forwards
        expected = from_python(lambda x=x: fn.fused_layernorm_linear(x, *inputs[1:]))
        assert len(python_forwards) == 1
        assert y.shape == expected.shape
        assert torch.equal(y, expected)


def other_memory(index: int, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def run(*inputs: Tensor) -> None:
        inputs[index].data = change(inputs[index].data)

    return run


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


CHANGES = {
    "strided input": other_memory(0, strided),
    "strided weight": other_memory(3, strided),
    "strided gamma": other_memory(1, strided),
    "strided bias": other_memory(4, strided),
    "input of another length": other_memory(0, lambda x: torch.cat([x, x], 1)),
    "longer weight": other_memory(3, lambda w: torch.cat([w, w], 1)),
    "shorter gamma": other_memory(1, lambda gamma: gamma[:4].clone()),
    "shorter bias": other_memory(4, lambda bias: bias[:4].clone()),
    "weight of another dtype": other_memory(3, lambda w: w.double()),
    "input of another dtype": other_memory(0, lambda x: x.double()),
    "gamma of another dtype": other_memory(1, lambda gamma: gamma.double()),
    "input shorter than a row": other_memory(0, lambda x: x[:1, :4].clone()),
    "no rows": other_memory(0, lambda x: x[:0]),
    "a vector for a weight": other_memory(3, lambda w: w.view(-1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_since_the_parameters_were_met(
    change: str, python_calls: list[Tensor], device: str
) -> None:
    def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> object:
        try:
            return function(*inputs)
        except RuntimeError:
            return None

    inputs = inputs_for(device)
    CHANGES[change](*inputs)
    y = outcome(fn.fused_layernorm_linear, inputs)
    expected = from_python(lambda: outcome(fn.fused_layernorm_linear, inputs))
    assert (y is None) == (expected is None)
    assert y is None or torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", ["sparse", "nested", "subclass"])
def test_inputs_that_are_pytorchs(layout: str, python_calls: list[Tensor], device: str) -> None:
    class Own(Tensor):
        pass

    make: dict[str, Callable[[Tensor], Tensor]] = {
        "sparse": lambda x: x.to_sparse(),
        "nested": lambda x: torch.nested.nested_tensor([x, x]),
        "subclass": lambda x: x.as_subclass(Own),
    }
    inputs = inputs_for(device)
    x = make[layout](inputs[0].detach())

    def outcome() -> tuple[type, str]:
        try:
            y = fn.fused_layernorm_linear(x, *inputs[1:])
        except (RuntimeError, NotImplementedError) as error:
            return type(error), str(error)
        return type(y), str(y.tolist() if not y.is_nested else y.unbind())

    assert outcome() == from_python(outcome)


@pytest.mark.parametrize("layout", ["negated", "zeros"])
def test_inputs_without_their_values_in_memory(
    layout: str, python_calls: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    x = LAYOUTS[layout](inputs[0].detach())
    y = fn.fused_layernorm_linear(x, *inputs[1:])
    assert torch.equal(y, fn.fused_layernorm_linear(x.clone(), *inputs[1:]))


@pytest.mark.parametrize("index", [0, 3])
def test_inference_tensors_are_pytorchs_error(
    index: int, python_calls: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    with torch.inference_mode():
        inputs[index] = inputs[index].clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            fn.fused_layernorm_linear(*inputs)


@pytest.mark.parametrize("subset", list(itertools.product([False, True], repeat=5))[1:], ids=str)
def test_any_subset_of_gradients(
    subset: tuple[bool, ...], python_calls: list[Tensor], device: str
) -> None:
    inputs = inputs_for(device)
    for tensor, required in zip(inputs, subset, strict=True):
        tensor.requires_grad_(required)
    grad_output = torch.randn(16, 16, device=device, dtype=inputs[0].dtype)
    assert_as_python(inputs, grad_output)
    missing = [
        None if i in (1, 2, 4) and not r else t
        for i, (t, r) in enumerate(zip(inputs, subset, strict=True))
    ]
    copies = as_copies(missing)
    fn.fused_layernorm_linear(*copies).backward(grad_output)
    for tensor, required in zip(copies, subset, strict=True):
        assert tensor is None or (tensor.grad is not None) == required
    assert not python_calls


def test_gradients_asked_for_alone(python_calls: list[Tensor], device: str) -> None:
    """`autograd.grad` asks for some of the tensors, all of which require a gradient."""
    inputs = inputs_for(device)
    y = fn.fused_layernorm_linear(*inputs)
    grad_output = torch.randn_like(y)
    every = torch.autograd.grad(y, inputs, grad_output, retain_graph=True)
    for index, expected in enumerate(every):
        (alone,) = torch.autograd.grad(y, inputs[index], grad_output, retain_graph=True)
        torch.testing.assert_close(alone, expected)
    assert not python_calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_grad_outputs(layout: str, python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    dy = LAYOUTS[layout](torch.randn(16, 16, device=device, dtype=inputs[0].dtype))
    assert_as_python(inputs, dy)
    assert len(python_calls) == (layout in ("negated", "zeros"))
