"""Parameters known from an earlier call, and calls that something other than a kernel watches."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from accuracy import eager, make_inputs
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.call import parameters as known_parameters


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
    monkeypatch.setattr("fused_norm.ops.compiled.module", lambda: None)


@pytest.mark.usefixtures("by_python")
def test_parameters_are_forgotten_with_their_first_tensor(device: str) -> None:
    gc.collect()
    before = len(known_parameters._kept)
    tensors = make_inputs(6, 12, 10, device=device)
    _check(tensors)
    assert len(known_parameters._kept) == before + 1
    del tensors[1]
    gc.collect()
    assert len(known_parameters._kept) == before


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


def test_parameters_of_a_module_are_swapped(device: str) -> None:
    """Regression: a reference that the library keeps would have PyTorch refuse the swap."""
    layer = fn.LayerNormLinear(12, 10, device=device)
    x = torch.randn(6, 12, device=device)
    layer(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.to(torch.bfloat16)
        layer(x.bfloat16())
        layer.load_state_dict(fn.LayerNormLinear(12, 10, device=device).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert layer(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.usefixtures("by_python")
def test_loading_a_state_leaves_what_graphs_read(device: str) -> None:
    """Regression: a captured graph reads folded weights, which went with the parameters."""
    layer = fn.LayerNormLinear(12, 10, device=device)
    layer(torch.randn(6, 12, device=device))
    parameters = (layer.layer_norm_weight, layer.layer_norm_bias, layer.weight, layer.bias)
    before = known_parameters.known(*parameters)
    assert before is not None
    layer.load_state_dict(fn.LayerNormLinear(12, 10, device=device).state_dict())
    layer.to(device)
    assert known_parameters.known(*parameters) is before
