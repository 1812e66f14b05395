"""Whether a provider computes the op: compared with float64 before anything of it is timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_norm.bench.ops import Formula
from fused_norm.bench.providers import Bind

# Errors are allowed up to this many of eager's own. Peers round where eager does not (Liger keeps
# bfloat16 statistics), while a bias, a term of a gradient or a row that is missing is far beyond.
FACTOR = 3.0
# What a long float32 sum may lose by being taken in another order.
SUMMATION = 1e-6


@dataclass(frozen=True)
class Truth:
    """An output and its gradients in float64.

    Attributes:
        values: The output, then the gradient of each leaf.
        names: What they are called.
    """

    values: list[Tensor]
    names: list[str]


def truth(
    formula: Formula, inputs: Sequence[Tensor], names: Sequence[str], grad_output: Tensor
) -> Truth:
    """Compute a formula and its gradients in float64 from the inputs as they are rounded.

    Args:
        formula: What is computed.
        inputs: The inputs in their own dtype.
        names: Their names.
        grad_output: The gradient of the output.
    """
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = formula(*wide)
    gradients = torch.autograd.grad(y, wide, grad_output.double(), allow_unused=True)
    kept = [(name, g) for name, g in zip(names, gradients, strict=True) if g is not None]
    return Truth(
        [y.detach(), *(gradient for _, gradient in kept)],
        ["y", *(f"grad_{name}" for name, _ in kept)],
    )


def errors(
    bind: Bind, inputs: list[Tensor], grad_output: Tensor, exact: Truth, *, gradients: bool
) -> dict[str, float]:
    """Return a provider's relative error against float64, by tensor.

    The error is the Frobenius norm of the difference over the norm of the truth; infinity where
    a value is not finite, or has another shape or dtype than it should.

    Args:
        bind: Binds the provider to inputs.
        inputs: The inputs.
        grad_output: The gradient of the output.
        exact: What float64 gives.
        gradients: Whether to run what training runs, or what inference does.
    """
    bound, dtype = bind(inputs), grad_output.dtype
    with torch.set_grad_enabled(gradients):
        y = bound.call()
    found = {"y": _error(y, exact.values[0], dtype)}
    if gradients:
        computed = torch.autograd.grad(y, bound.leaves, grad_output, allow_unused=True)
        for name, gradient, value in zip(exact.names[1:], computed, exact.values[1:], strict=True):
            found[name] = _error(gradient, value, dtype)
    return found


def verdict(found: dict[str, float], eager: dict[str, float], dtype: torch.dtype) -> str:
    """Return what is wrong with a provider, or an empty string.

    Args:
        found: Its errors.
        eager: PyTorch's errors at the same inputs.
        dtype: The dtype of the inputs.
    """
    rounding = torch.finfo(dtype).eps / 2 + (0 if dtype is torch.float64 else SUMMATION)
    wrong = []
    for name, error in found.items():
        allowed = FACTOR * (eager.get(name, 0.0) + rounding)
        if not math.isfinite(error) or error > allowed:
            wrong.append(f"{name} is off by {error:.2g} of its norm, {allowed:.2g} is allowed")
    return "; ".join(wrong)


def _error(value: Tensor | None, exact: Tensor, dtype: torch.dtype) -> float:
    if value is None or value.shape != exact.shape or value.dtype is not dtype:
        return float("inf")
    difference = float((value.detach().double() - exact).norm())
    if difference != difference:
        return float("inf")
    scale = float(exact.norm())
    return difference / scale if scale else difference
