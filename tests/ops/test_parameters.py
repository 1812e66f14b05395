"""Parameters known from an earlier call, and calls that something other than a kernel watches."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accuracy import eager, make_inputs
from torch import Tensor, nn

import fused_norm as fn


def _check(tensors: list[Tensor]) -> None:
    """Compare a first call, one that knows the parameters, and one with gradients."""
    torch.testing.assert_close(fn.fused_layernorm_linear(*tensors), eager(*tensors))
    torch.testing.assert_close(fn.fused_layernorm_linear(*tensors), eager(*tensors))
    x = tensors[0].detach().requires_grad_()
    y = fn.fused_layernorm_linear(x, *tensors[1:])
    torch.testing.assert_close(y, eager(x, *tensors[1:]))
    torch.testing.assert_close(
        *(torch.autograd.grad(f.sum(), x)[0] for f in (y, eager(x, *tensors[1:])))
    )


def _other_values(tensors: list[Tensor]) -> None:
    for tensor in tensors[1:]:
        tensor.data = torch.randn_like(tensor)


def _fewer_outputs(tensors: list[Tensor]) -> None:
    """Prune outputs: the memory begins where it did."""
    tensors[3].data, tensors[4].data = tensors[3].data[:7], tensors[4].data[:7]


def _expanded_bias(tensors: list[Tensor]) -> None:
    tensors[4].data = tensors[4].data[:1].expand(len(tensors[4]))


def _strided_gamma(tensors: list[Tensor]) -> None:
    tensors[1].data = torch.stack([tensors[1], tensors[1] * 2], 1).view(-1)[::2]


def _transposed_weight(tensors: list[Tensor]) -> None:
    tensors[3].data = tensors[3].data.t().contiguous().t()


def _other_dtype(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.double()


CHANGES = [
    _other_values,
    _fewer_outputs,
    _expanded_bias,
    _strided_gamma,
    _transposed_weight,
    _other_dtype,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_data_of_known_parameters_is_replaced(
    change: Callable[[list[Tensor]], None], device: str
) -> None:
    if device == "cuda" and change is _other_dtype:
        pytest.skip("no float64 kernels on a GPU")
    tensors = make_inputs(6, 12, 12, device=device)
    _check(tensors)
    change(tensors)
    _check(tensors)


def test_wrong_shapes_are_errors_after_a_right_call(device: str) -> None:
    tensors = make_inputs(6, 12, 10, device=device)
    _check(tensors)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fn.fused_layernorm_linear(tensors[0][:, :11], *tensors[1:])
    tensors[3].data = tensors[3].data[:, :9]
    with pytest.raises(RuntimeError):
        fn.fused_layernorm_linear(*tensors)


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the C++ node aside, which knows no parameters again."""
    monkeypatch.setattr("fused_norm.ops.node.module", lambda: None)


@pytest.mark.usefixtures("by_python", "own_kernels")
def test_other_gamma_in_the_same_memory() -> None:
    """Regression: a gamma was met again by its address alone, and read as what had been there."""
    x, gamma, _, weight, _ = make_inputs(6, 16, 8, dtype=torch.bfloat16)
    memory = torch.randn(16)
    gamma.data = memory.view(torch.bfloat16)[:16]

    def check() -> None:
        for _ in range(2):
            y = fn.fused_layernorm_linear(x, gamma, None, weight, None)
            z = F.layer_norm(x.float(), (16,), gamma.float()).to(x.dtype)
            torch.testing.assert_close(y, F.linear(z, weight), rtol=0.02, atol=0.05)

    check()
    gamma.data = memory
    check()
    # PyTorch's own words for one that is too short.
    gamma.data = memory[:8]
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fn.fused_layernorm_linear(x, gamma, None, weight, None)


@pytest.mark.usefixtures("by_python")
def test_nothing_refers_to_parameters_after_a_call(device: str) -> None:
    tensors = make_inputs(6, 12, 10, device=device)
    _check(tensors)
    assert not any(map(weakref.getweakrefs, tensors))
    kept = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_one_weight_with_several_other_parameters(device: str) -> None:
    x, gamma, beta, weight, bias = make_inputs(6, 12, 10, device=device)
    for ln_weight in (gamma, None, gamma * 2):
        for linear_bias in (bias, None):
            _check([x, ln_weight, beta, weight, linear_bias])


def test_inputs_of_other_kinds_after_a_right_call(device: str) -> None:
    tensors = make_inputs(6, 12, 10, device=device)
    _check(tensors)
    x, parameters = tensors[0], tensors[1:]
    for other in (x.t().contiguous().t(), x[:0], x[0], x.expand(3, 6, 12), torch._neg_view(x)):
        torch.testing.assert_close(
            fn.fused_layernorm_linear(other, *parameters), eager(other, *parameters)
        )
    torch.testing.assert_close(
        fn.fused_layernorm_linear(nn.Parameter(x), *parameters), eager(x, *parameters)
    )


def test_zeros_without_memory(device: str) -> None:
    x, *parameters = make_inputs(6, 12, 10, device=device)
    zeros = torch._efficientzerotensor(x.shape, device=device)
    for _ in range(2):
        torch.testing.assert_close(
            fn.fused_layernorm_linear(zeros, *parameters),
            eager(torch.zeros_like(x), *parameters),
        )


def test_batched_gradients(device: str) -> None:
    tensors = make_inputs(6, 12, 10, device=device, requires_grad=True)
    rows = torch.randn(5, 6, 10, device=device)
    results = [
        torch.autograd.grad(f(*tensors), tensors, rows, is_grads_batched=True)
        for f in (fn.fused_layernorm_linear, eager)
    ]
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_traced_graphs_contain_the_call(device: str) -> None:
    tensors = make_inputs(6, 12, 10, device=device)
    _check(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: fn.fused_layernorm_linear(x, *tensors[1:]), tensors[0])
    x = torch.randn_like(tensors[0])
    torch.testing.assert_close(traced(x), eager(x, *tensors[1:]))


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": lambda: fn.LayerNormLinear(12, 10),
    "RMSNorm": lambda: fn.LayerNormLinear(12, 10, normalization="RMSNorm", eps=None),
    "split gate": lambda: fn.LayerNormLinear(
        12, 10, parameters_split=["gate", "up"], activation="swiglu"
    ),
    "MLP": lambda: fn.LayerNormMLP(12, 20, activation="gelu"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_traced_modules(name: str, grad: bool, device: str, tmp_path: Path) -> None:
    """The check of `torch.jit.trace` runs without gradients, and met another graph, or an error."""
    module = MODULES[name]().to(device)
    x = torch.randn(6, 12, device=device, requires_grad=grad)
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, x)
        torch.jit.save(traced, tmp_path / "module.pt")
        loaded = torch.jit.load(tmp_path / "module.pt")
    other = torch.randn(5, 12, device=device)
    found = []
    for run in (module, traced, loaded):
        leaf = other.clone().requires_grad_()
        y = run(leaf)
        parameter = next(run.parameters())
        found.append([y, *torch.autograd.grad(y.square().sum(), [leaf, parameter])])
    for mine in found[1:]:
        torch.testing.assert_close(mine, found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("node", ["C++", "Python"])
def test_parameters_are_swapped(node: str, device: str, request: pytest.FixtureRequest) -> None:
    """Regression: PyTorch swaps no tensor to which there are weak references."""
    request.getfixturevalue("python_calls" if node == "C++" else "by_python")
    layer, other = (fn.LayerNormLinear(12, 10, device=device) for _ in range(2))
    x = torch.randn(6, 12, device=device)
    with torch.no_grad():
        expected = other(x)
    layer(x).sum().backward()
    layer.zero_grad()
    for name, parameter in layer.named_parameters():
        torch.utils.swap_tensors(parameter, other.get_parameter(name))
    torch.testing.assert_close(layer(x), expected)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.to(torch.bfloat16)
        layer(x.bfloat16())
        layer.load_state_dict(fn.LayerNormLinear(12, 10, device=device).state_dict())
        for module in (nn.LayerNorm(12, device=device), nn.Linear(12, 10, device=device)):
            functional = (x, module.weight, module.bias)
            if isinstance(module, nn.Linear):
                fn.norm_linear(*functional)
            else:
                fn.fused_layernorm_linear(x, module.weight, module.bias, x[:, :12], None)
            module.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert layer(x.bfloat16()).dtype is torch.bfloat16
