"""What the tests compare with: float64 as the truth, PyTorch in the same dtype as the bar."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn

NAMES = ("x", "ln_weight", "ln_bias", "linear_weight", "linear_bias")


def make_inputs(
    rows: int | tuple[int, ...],
    features: int,
    outputs: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    affine_dtype: torch.dtype | None = None,
    mean: float = 0.0,
    requires_grad: bool = False,
) -> list[Tensor]:
    """Return x, ln_weight, ln_bias, linear_weight, linear_bias.

    Weights of ones and biases of zeros would hide a swapped or a missing one, so none are.
    """
    leading = (rows,) if isinstance(rows, int) else rows
    x = torch.randn(*leading, features, dtype=torch.float64) + mean
    tensors = [
        x.to(dtype),
        (1 + 0.2 * torch.randn(features, dtype=torch.float64)).to(affine_dtype or dtype),
        (0.2 * torch.randn(features, dtype=torch.float64)).to(affine_dtype or dtype),
        (torch.randn(outputs, features, dtype=torch.float64) / max(features, 1) ** 0.5).to(dtype),
        (0.2 * torch.randn(outputs, dtype=torch.float64)).to(dtype),
    ]
    return [t.to(device).requires_grad_(requires_grad) for t in tensors]


def eager(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    """Return what PyTorch computes."""
    z = F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)
    return F.linear(z.to(linear_weight.dtype), linear_weight, linear_bias)


def as_float64(inputs: list[Tensor | None]) -> list[Tensor | None]:
    """Return detached copies in float64 that require the same gradients."""
    return [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in inputs]


def as_copies(inputs: list[Tensor | None]) -> list[Tensor | None]:
    """Return detached copies that require the same gradients."""
    return [t if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]


def gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor
) -> list[Tensor]:
    """Return the result of a function on copies of its inputs, and all of their gradients."""
    copies = as_copies(inputs)
    y = function(*copies)
    y.backward(grad_output)
    return [y.detach(), *(t.grad for t in copies)]


def assert_within_budget(
    name: str, actual: Tensor, truth: Tensor, bar: Tensor, factor: float = 2.0
) -> None:
    """Assert that `actual` errs at most `factor` times as much as PyTorch in the same dtype.

    The error is the Frobenius norm of the difference to `truth`, in float64; half a unit in the
    last place of `actual`'s dtype is also allowed, for results that PyTorch happens to hit
    exactly.

    Args:
        name: What is compared, for the message.
        actual: Result under test.
        truth: The same in float64.
        bar: The same by PyTorch, in the dtype of `actual`.
        factor: How many of PyTorch's errors are allowed.
    """
    assert actual.shape == truth.shape, f"{name}: {tuple(actual.shape)} != {tuple(truth.shape)}"
    assert actual.dtype == bar.dtype, f"{name}: {actual.dtype} != {bar.dtype}"
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    scale = truth.norm().item()
    error = (actual.double() - truth).norm().item()
    allowed = (bar.double() - truth).norm().item()
    floor = torch.finfo(actual.dtype).eps / 2 * scale
    if actual.dtype is torch.float64:
        # float64 is its own truth, so the rounding of both sides stands between the two.
        floor = 1e-14 * max(scale, 10.0)
    assert error <= factor * (allowed + floor), (
        f"{name}: error {error:.3g}, PyTorch's {allowed:.3g}, norm {scale:.3g}"
    )


def check(inputs: list[Tensor | None], eps: float = 1e-5, factor: float = 2.0) -> None:
    """Compare the output and every gradient that is required with float64."""
    ours, theirs, truth = as_copies(inputs), as_copies(inputs), as_float64(inputs)
    y, bar, exact = fn.fused_layernorm_linear(*ours, eps), eager(*theirs, eps), eager(*truth, eps)
    assert_within_budget("y", y, exact, bar, factor)
    grad_output = torch.randn_like(exact).to(y.dtype)
    if y.requires_grad:
        y.backward(grad_output)
        bar.backward(grad_output)
        exact.backward(grad_output.double())
    for name, mine, low, high in zip(NAMES, ours, theirs, truth, strict=True):
        if mine is not None and mine.requires_grad:
            assert_within_budget(f"grad_{name}", mine.grad, high.grad, low.grad, factor)
