"""The shapes and tolerances that other libraries hold their LayerNorm+Linear or LayerNorm to.

Where a library tests a LayerNorm alone, its shapes are given a Linear layer. Tolerances are theirs,
absolute and relative as `torch.testing.assert_close` takes them; the inputs are ours.
"""

from __future__ import annotations

import pytest
import torch
from accuracy import NAMES, as_copies, as_float64, eager, make_inputs
from torch import Tensor

import fused_norm as fn

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Tolerance = tuple[float, float]  # absolute, relative


def compare(
    inputs: list[Tensor | None],
    forward: Tolerance,
    backward: Tolerance,
    eps: float = 1e-5,
) -> None:
    """Hold the output and the gradients to float64 on the same inputs."""
    ours, truth = as_copies(inputs), as_float64(inputs)
    y, exact = fn.fused_layernorm_linear(*ours, eps), eager(*truth, eps)
    theirs = eager(*as_copies(inputs), eps).double()
    if torch.allclose(theirs, exact, atol=forward[0], rtol=forward[1]):
        assert_close("y", y, exact, forward)
    else:  # of a LayerNorm alone, and missed by PyTorch's own product: the library's budget counts
        assert (y.double() - exact).abs().max() <= 2 * (theirs - exact).abs().max()
    grad_output = torch.randn_like(exact).to(y.dtype)
    y.backward(grad_output)
    exact.backward(grad_output.double())
    for name, mine, high in zip(NAMES, ours, truth, strict=True):
        if mine is not None:
            # A sum over rows grows with their root, and so do the numbers that it is rounded from.
            rows = 1 if name == "x" else max(1.0, (grad_output.numel() / y.shape[-1]) ** 0.5)
            assert_close(f"grad_{name}", mine.grad, high.grad, (backward[0] * rows, backward[1]))


def assert_close(name: str, actual: Tensor, exact: Tensor, tolerance: Tolerance) -> None:
    torch.testing.assert_close(
        actual.double(), exact, atol=tolerance[0], rtol=tolerance[1], msg=lambda m: f"{name}: {m}"
    )


# TransformerEngine, tests/pytorch/test_numerics.py: LayerNormLinear.
TE = {F32: (2.5e-4, 1e-3), F16: (2e-3, 4e-2), BF16: (2e-2, 4e-2)}
TE_BACKWARD = {F32: (1e-3, 1e-3), F16: (5e-2, 4e-2), BF16: (5e-2, 4e-2)}


@pytest.mark.parametrize("eps", [1e-1, 1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", TE, ids=str)
def test_transformer_engine(dtype: torch.dtype, bias: bool, eps: float, device: str) -> None:
    inputs = make_inputs((32, 2), 128, 512, dtype=dtype, device=device, requires_grad=True)
    if not bias:
        inputs[4] = None
    compare(inputs, TE[dtype], TE_BACKWARD[dtype], eps)


# TransformerEngine, tests/cpp/operator/test_normalization.cu.
@pytest.mark.parametrize("shape", [(71, 229), (29, 541), (768, 6144), (2048, 12288)], ids=str)
def test_transformer_engine_cpp(shape: tuple[int, int], device: str) -> None:
    if device == "cpu" and shape[0] > 71:
        shape = (shape[0] // 16, shape[1])  # of a size for a CPU; columns are what differs
    inputs = make_inputs(*shape, 40, device=device, requires_grad=True)
    compare(inputs, (5e-6, 5e-4), (5e-4, 5e-4))


# Liger, test/transformers/test_layer_norm.py.
LIGER = {F32: (1e-5, 1e-5), BF16: (2e-2, 2e-2)}


@pytest.mark.parametrize("shape", [(2, 8, 64), (1, 1, 1023), (3, 7, 256), (1, 1, 1500)], ids=str)
@pytest.mark.parametrize("dtype", LIGER, ids=str)
def test_liger(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    inputs = make_inputs(shape[:-1], shape[-1], 33, dtype=dtype, device=device, requires_grad=True)
    compare(inputs, LIGER[dtype], LIGER[dtype])


# Apex, tests/L0/run_fused_layer_norm: few rows and 65536, whole and strided.
@pytest.mark.parametrize("batch", [16, pytest.param(65536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_apex(dtype: torch.dtype, strided: bool, batch: int, device: str) -> None:
    x, *parameters = make_inputs((batch, 32), 16, 8, dtype=dtype, device=device, requires_grad=True)
    if strided:
        parts = torch.randn(batch, 6 * 5, 16 * 3, device=device).to(dtype)
        x = parts[::3, ::5, ::3].detach().requires_grad_()
    tolerances = {F32: (1e-5, 1e-4), F16: (1e-3, 1e-2), BF16: (1.6e-2, 1.6e-2)}
    backward = {F32: (1e-4, 1e-4), F16: (1e-2, 1e-2), BF16: (3e-2, 1.6e-2)}
    compare([x, *parameters], tolerances[dtype], backward[dtype])


# FLA, tests/modules/test_layernorm.py: relative root mean square below 1e-3; short texts.
@pytest.mark.parametrize("rows", [*range(1, 33)])
def test_flash_linear_attention(rows: int, device: str) -> None:
    inputs = make_inputs((1, rows), 50, 64, device=device, requires_grad=True)
    ours, truth = as_copies(inputs), as_float64(inputs)
    y, exact = fn.fused_layernorm_linear(*ours), eager(*truth)
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    exact.backward(grad_output.double())
    pairs = [(y, exact), *((a.grad, b.grad) for a, b in zip(ours, truth, strict=True))]
    for mine, other in pairs:
        assert (mine.double() - other).norm() < 1e-3 * other.norm()


# quack, tests/test_layernorm.py: few and many rows, long ones.
QUACK = {F32: (1e-4, 1e-4), F16: (1e-3, 1e-2), BF16: (1e-2, 2e-2)}
QUACK_BACKWARD = {F32: (1e-4, 1e-3), F16: (5e-3, 1e-2), BF16: (5e-2, 2e-2)}


@pytest.mark.parametrize("features", [192, 256, 760, 1024, 1128, 8192, 32768, 131072, 262144])
@pytest.mark.parametrize("rows", [1, 37, 199])
@pytest.mark.parametrize("dtype", QUACK, ids=str)
def test_quack(dtype: torch.dtype, rows: int, features: int, device: str) -> None:
    if device == "cpu" and rows * features > 2**21:
        pytest.skip("long on a CPU")
    inputs = make_inputs(rows, features, 8, dtype=dtype, device=device, requires_grad=True)
    compare(inputs, QUACK[dtype], QUACK_BACKWARD[dtype])


def test_quack_ragged_rows_far_from_zero(device: str) -> None:
    """Their regression: lanes past the end of a row of 769 took part in its variance."""
    inputs = make_inputs(64, 769, 32, device=device, mean=1000.0, requires_grad=True)
    compare(inputs, (2e-3, 1e-3), (2e-3, 2e-3))
