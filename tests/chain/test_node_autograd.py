"""The node in PyTorch's autograd: hooks, modes, in-place writes, other graphs, and its errors."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from accuracy import eager, make_inputs
from compiling import ITS_OWN_WARNINGS
from node_calls import assert_as_python, gradients, inputs_for
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_norm as fn
from fused_norm.ops import node

pytestmark = ITS_OWN_WARNINGS


def messages(function: Callable[..., Tensor], spoil: Callable[..., None], device: str) -> str:
    inputs = [t.clone() for t in inputs_for(device)]
    y = function(*inputs)
    with pytest.raises(RuntimeError) as error:
        spoil(y, *inputs)
    # PyTorch names its own node and the version that it met.
    return re.sub(r"output \d+ of \w+|version \d+", "", str(error.value))


def test_second_backward_is_pytorchs_error(python_calls: list[Tensor], device: str) -> None:
    def spoil(y: Tensor, *_: Tensor) -> None:
        y.sum().backward()
        y.sum().backward()

    message = messages(fn.fused_layernorm_linear, spoil, device)
    assert message == messages(eager, spoil, device)
    assert "backward through the graph a second time" in message


@pytest.mark.parametrize("index", [0, 1, 3])
def test_change_in_place_is_pytorchs_error(
    index: int, python_calls: list[Tensor], device: str
) -> None:
    def spoil(y: Tensor, *inputs: Tensor) -> None:
        with torch.no_grad():
            inputs[index].mul_(2)
        y.sum().backward()

    message = messages(fn.fused_layernorm_linear, spoil, device)
    assert "modified by an inplace operation" in message
    if index != 3:  # of the weight, PyTorch saves a transposed view
        assert message == messages(eager, spoil, device)


def test_result_may_change_in_place(python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    y = fn.fused_layernorm_linear(*inputs)
    y.mul_(2).add_(1)
    y.backward(torch.ones_like(y))
    doubled = inputs[4].grad
    assert torch.equal(doubled, torch.full_like(doubled, 32))


def test_result_of_pytorchs_ops_may_change_in_place() -> None:
    """F.linear of one row gives a view."""
    x, gamma, beta, weight, bias = make_inputs((), 24, 10, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = fn.fused_layernorm_linear(x, gamma, beta, weight, bias)
    y.mul_(2)
    y.backward(torch.ones_like(y))
    assert torch.equal(bias.grad, torch.full_like(bias, 2))


def test_retained_graph(python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    grad_output = torch.randn(16, 16, device=device, dtype=inputs[0].dtype)
    expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    y = fn.fused_layernorm_linear(*inputs)
    y.backward(grad_output, retain_graph=True)
    y.backward(grad_output)
    for tensor, once in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * once)
    assert not python_calls


def test_second_derivatives(python_calls: list[Tensor]) -> None:
    inputs = make_inputs(4, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        fn.fused_layernorm_linear, inputs, check_undefined_grad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(fn.fused_layernorm_linear, inputs)
    assert all(
        torch._C._functorch.is_legacy_batchedtensor(dy) or dy.requires_grad for dy in python_calls
    )
    assert python_calls


def test_undefined_grad_output(python_calls: list[Tensor], device: str) -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, grad_output: Tensor) -> None:
            return None

    inputs = inputs_for(device)
    Cut.apply(fn.fused_layernorm_linear(*inputs)).sum().backward()
    assert [t.grad for t in inputs] == [None] * 5
    assert not python_calls


def test_hooks(python_calls: list[Tensor], device: str) -> None:
    seen = []
    inputs = inputs_for(device)
    y = fn.fused_layernorm_linear(*inputs)
    assert y.grad_fn.name() == "NormLinearBackward"
    assert [edge[0].name() for edge in y.grad_fn.next_functions] == [
        "torch::autograd::AccumulateGrad"
    ] * 5
    y.register_hook(lambda dy: seen.append("tensor") or 2 * dy)
    y.grad_fn.register_prehook(lambda dy: seen.append("before"))
    y.grad_fn.register_hook(lambda dx, dy: seen.append("after"))
    inputs[0].register_hook(lambda dx: seen.append("input"))
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    assert seen == ["tensor", "before", "after", "input"]
    for tensor, expected in zip(
        inputs, gradients(fn.fused_layernorm_linear, inputs, 2 * grad_output), strict=True
    ):
        assert torch.equal(tensor.grad, expected)
    assert not python_calls


def test_saved_tensors_hooks(python_calls: list[Tensor], device: str) -> None:
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach().cpu().clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.shape)
        return tensor.to(device)

    def run(*inputs: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return fn.fused_layernorm_linear(*inputs)

    inputs = inputs_for(device)
    assert_as_python(inputs, torch.randn(16, 16, device=device, dtype=inputs[0].dtype), run)
    assert len(packed) == 6
    assert packed == unpacked


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, python_calls: list[Tensor], device: str) -> None:
    inputs = inputs_for(device)
    grad_output = torch.randn(16, 16, device=device, dtype=inputs[0].dtype)
    assert_as_python(
        inputs,
        grad_output,
        lambda *a: checkpoint(fn.fused_layernorm_linear, *a, use_reentrant=reentrant),
    )
    assert not python_calls


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode(python_calls: list[Tensor]) -> None:
    inputs = inputs_for("cpu")
    with torch.autograd.detect_anomaly(check_nan=True):
        y = fn.fused_layernorm_linear(*inputs)
        with (
            pytest.warns(UserWarning, match="(?s)NormLinearBackward.*in test_anomaly_mode"),
            pytest.raises(RuntimeError, match="'NormLinearBackward' returned nan values"),
        ):
            y.backward(torch.full_like(y, torch.nan))


def test_modes_see_the_backward(python_calls: list[Tensor], device: str) -> None:
    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    y = fn.fused_layernorm_linear(*inputs_for(device))
    with Log():
        y.backward(torch.randn_like(y))
    assert "fused_norm.norm_linear_backward.default" in names
    assert len(python_calls) == 1


def test_tangent_of_grad_output(python_calls: list[Tensor]) -> None:
    inputs = make_inputs(4, 5, 3, requires_grad=True)
    y = fn.fused_layernorm_linear(*inputs)
    dy, tangent = torch.randn_like(y), torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, tangent, retain_graph=True)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        result = torch.autograd.grad(y, inputs, forward_ad.make_dual(dy, tangent))
        tangents = [forward_ad.unpack_dual(g).tangent for g in result]
    for mine, other in zip(tangents, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert len(python_calls) == 1


def test_compiled_autograd(python_calls: list[Tensor]) -> None:
    inputs = inputs_for("cpu")
    inputs[1].requires_grad_(False)
    grad_output = torch.randn(16, 16)
    expected = gradients(fn.fused_layernorm_linear, inputs, grad_output)
    y = fn.fused_layernorm_linear(*inputs)
    compiler = torch.compile(backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        y.backward(grad_output)
    for tensor, other in zip(inputs, expected, strict=True):
        assert (tensor.grad is None) == (other is None)
        assert other is None or torch.equal(tensor.grad, other)
    assert len(python_calls) == 1


def test_error_of_python_is_raised(
    python_calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of a test")

    y = fn.fused_layernorm_linear(*inputs_for("cpu"))
    monkeypatch.setattr(node, "gradients", fail)
    with pytest.raises(ZeroDivisionError, match="of a test"):
        y.backward(torch._neg_view(torch.ones_like(y)))
