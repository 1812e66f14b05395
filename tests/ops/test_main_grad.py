"""LayerNormLinear(fuse_wgrad_accumulation=True): gradients of the weight go to main_grad."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fused_norm as fn

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def layers(dtype: torch.dtype, device: str, **options: bool) -> tuple[fn.LayerNormLinear, ...]:
    """Return a layer that accumulates, and the same without."""
    layer = fn.LayerNormLinear(
        48, 40, device=device, dtype=dtype, fuse_wgrad_accumulation=True, **options
    )
    plain = copy.deepcopy(layer)
    plain.fuse_wgrad_accumulation = False
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    layer.weight.main_grad = torch.ones_like(layer.weight, dtype=wide)
    return layer, plain


def skip_without_kernel(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("float64 has no GPU kernel")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(30,), (2, 3, 5), ()], ids=str)
@pytest.mark.usefixtures("own_kernels")
def test_adds_what_grad_would_be(leading: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Two backwards into a main_grad of ones; what else has a gradient gets the same as without."""
    skip_without_kernel(device, dtype)
    layer, plain = layers(dtype, device)
    ln, linear = copy.deepcopy(plain).double().cpu().to_modules()
    expected = torch.ones(40, 48, dtype=torch.float64)
    for _ in range(2):
        x = torch.randn(*leading, 48, device=device).to(dtype)
        dy = torch.randn(*leading, 40, device=device).to(dtype)
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        layer(mine).backward(dy)
        plain(other).backward(dy)
        linear.zero_grad()
        linear(ln(x.double().cpu())).backward(dy.double().cpu())
        expected += linear.weight.grad
        assert torch.equal(mine.grad, other.grad)
    assert layer.weight.grad is None
    for name, parameter in plain.named_parameters():
        if name != "weight":
            assert torch.equal(layer.get_parameter(name).grad, parameter.grad)
    # On tensor cores z is rounded to the dtype, on a CPU nothing is.
    narrow = device == "cuda" and dtype in (torch.bfloat16, torch.float16)
    tolerance = torch.finfo(dtype).eps if narrow else 4 * torch.finfo(torch.float32).eps
    error = (layer.weight.main_grad.double().cpu() - expected).norm() / expected.norm()
    assert error < tolerance


def test_small_gradients_add_up(device: str) -> None:
    """What bfloat16 would round away next to a large sum stays in float32."""
    layer, _ = layers(torch.bfloat16, device)
    layer.weight.main_grad.fill_(1000.0)
    x = torch.randn(16, 48, device=device).bfloat16()
    for _ in range(8):
        layer(x).backward(torch.full((16, 40), 1e-3, device=device).bfloat16())
    assert (layer.weight.main_grad - 1000).abs().mean() > 1e-3


def test_tells_megatron(device: str) -> None:
    layer, _ = layers(torch.float32, device)
    layer.weight.grad_added_to_main_grad = False
    layer.weight.zero_out_wgrad = True
    layer(torch.randn(5, 48, device=device)).sum().backward()
    assert layer.weight.grad_added_to_main_grad
    assert layer.weight.grad.shape == layer.weight.shape
    assert not layer.weight.grad.any()
    assert not torch.equal(layer.weight.main_grad, torch.ones_like(layer.weight))


def test_under_autocast(device: str) -> None:
    layer, plain = layers(torch.float32, device)
    x = torch.randn(30, 48, device=device)
    for module in (layer, plain):
        with torch.autocast(device, torch.bfloat16):
            y = module(x)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
    torch.testing.assert_close(layer.weight.main_grad - 1, plain.weight.grad, rtol=3e-2, atol=3e-1)


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}], ids=str)
def test_without_some_parameters(options: dict[str, bool], device: str) -> None:
    layer, plain = layers(torch.float32, device, **options)
    x = torch.randn(30, 48, device=device)
    for module in (layer, plain):
        module(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.main_grad - 1, plain.weight.grad, rtol=1e-4, atol=1e-3)


def test_frozen_weight_and_no_grad(device: str) -> None:
    layer, _ = layers(torch.float32, device)
    x = torch.randn(5, 48, device=device, requires_grad=True)
    del layer.weight.main_grad
    with torch.no_grad():
        layer(x)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None


def _bad() -> dict[str, Tensor | None]:
    return {
        "none": None,
        "shape": torch.zeros(40, 47),
        "dtype": torch.zeros(40, 48, dtype=torch.bfloat16),
        "device": torch.zeros(40, 48, device="meta"),
    }


@pytest.mark.parametrize("case", _bad())
def test_needs_a_fitting_main_grad(case: str) -> None:
    layer, _ = layers(torch.float32, "cpu")
    layer.weight.main_grad = _bad()[case]
    with pytest.raises(RuntimeError, match=r"needs weight\.main_grad of shape \[40, 48\]"):
        layer(torch.randn(5, 48))


def test_state_and_second_derivatives() -> None:
    layer, plain = layers(torch.float32, "cpu")
    assert list(layer.state_dict()) == list(plain.state_dict())
    x = torch.randn(5, 48, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


FAMILY: dict[str, dict[str, Any]] = {
    "RMSNorm": {"normalization": "RMSNorm"},
    "split": {"normalization": "RMSNorm", "parameters_split": ["a", "b"]},
    "activated": {"activation": "gelu"},
    "gate": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
}


def members(name: str, device: str, dtype: torch.dtype) -> tuple[fn.LayerNormLinear, ...]:
    """Return a layer that accumulates, and the same without."""
    options = FAMILY[name]
    layer = fn.LayerNormLinear(
        48, 40, device=device, dtype=dtype, fuse_wgrad_accumulation=True, **options
    )
    plain = copy.deepcopy(layer)
    plain.fuse_wgrad_accumulation = False
    for weight in layer._linear_parameters()[0]:
        weight.main_grad = torch.ones_like(weight, dtype=torch.promote_types(dtype, torch.float32))
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True
    return layer, plain


def assert_added(layer: fn.LayerNormLinear, plain: fn.LayerNormLinear) -> None:
    """Compare what was added with the gradients of the plain layer."""
    for weight, other in zip(*(m._linear_parameters()[0] for m in (layer, plain)), strict=True):
        torch.testing.assert_close(
            weight.main_grad - 1, other.grad.to(weight.main_grad.dtype), rtol=1e-2, atol=2e-2
        )
        assert weight.grad_added_to_main_grad
        assert not weight.grad.any()


def _longer_than_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_norm.ops.operands.LONGEST_ROW", 40)


def _of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_norm.ops.norm_linear.fits", lambda *_: False)


REASONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "kernels": lambda _: None,
    "no forward": _longer_than_kernels_take,
    "no backward": _of_another_size,
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("name", FAMILY)
def test_the_family(name: str, reason: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call had no kernel, `main_grad` stayed as it was, and the gradient went to `grad`."""
    layer, plain = members(name, device, torch.float32)
    x = torch.randn(30, 48, device=device)
    plain(x).square().sum().backward()
    REASONS[reason](monkeypatch)
    layer(x).square().sum().backward()
    assert_added(layer, plain)


@pytest.mark.parametrize("name", FAMILY)
def test_no_kernel_for_a_dtype(name: str) -> None:
    """The real thing: a GPU has no kernel of float64, and no device one for no rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer, plain = members(name, device, torch.float64)
    for rows in (0, 7):
        x = torch.randn(rows, 48, device=device, dtype=torch.float64)
        for module in (layer, plain):
            module(x).square().sum().backward()
    assert_added(layer, plain)


# Of Dynamo, where it leaves the function to autograd; and where it makes one of 2.11's.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["plain", *FAMILY])
def test_compiled(name: str, device: str) -> None:
    if torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("where a graph breaks, PyTorch's compiler loses the items of named tuples")
    layer, plain = (
        members(name, device, torch.float32) if name in FAMILY else layers(torch.float32, device)
    )
    if name not in FAMILY:
        layer.weight.grad_added_to_main_grad, layer.weight.zero_out_wgrad = False, True
    x = torch.randn(30, 48, device=device)
    plain(x).square().sum().backward()
    torch._dynamo.reset()
    torch.compile(layer, backend="aot_eager")(x).square().sum().backward()
    assert_added(layer, plain)
