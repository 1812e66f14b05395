"""Whether a provider computes the op: compared with float64 before anything of it is timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.case import Case, Formula, listed
from benchmarks.provider import Bind

# Errors are allowed up to this many of eager's own. Peers round where eager does not (Liger keeps
# bfloat16 statistics), while a bias, a term of a gradient or a row that is missing is far beyond.
FACTOR = 3.0
# What a long float32 sum may lose by being taken in another order.
SUMMATION = 1e-6


@dataclass(frozen=True)
class Truth:
    """Outputs and gradients in float64.

    Attributes:
        outputs: By name.
        gradients: Those of the inputs by name, None for an input that is not used.
        sizes: What the errors of some gradients are relative to, instead of their own norm: for a
            scalar, the norm of what each row adds to it.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    sizes: dict[str, float]


def truth(
    formula: Formula, case: Case, inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> Truth:
    """Compute a formula and its gradients in float64 from the inputs as they are rounded.

    Args:
        formula: What is computed.
        case: Knows the names of inputs and outputs.
        inputs: The inputs in their own dtype.
        grad_outputs: The gradients of the outputs.
    """
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ys = listed(formula(*wide))
    dys = [gradient.double() for gradient in grad_outputs]
    gradients = torch.autograd.grad(ys, wide, dys, allow_unused=True)
    made = case.op.inputs(case.shape)
    sizes = {}
    for i, (name, one) in enumerate(made.items()):
        if one.is_scalar and gradients[i] is not None:
            of_rows = wide[i].detach().repeat(*inputs[0].shape[:-1], 1).requires_grad_()
            (shares,) = torch.autograd.grad(
                listed(formula(*wide[:i], of_rows, *wide[i + 1 :])), of_rows, dys
            )
            sizes[name] = float(shares.norm())
    return Truth(
        dict(zip(case.op.outputs(case.shape), (y.detach() for y in ys), strict=True)),
        dict(zip(made, gradients, strict=True)),
        sizes,
    )


def errors(
    bind: Bind,
    inputs: list[Tensor],
    grad_outputs: Sequence[Tensor],
    exact: Truth,
    *,
    gradients: bool,
) -> dict[str, float]:
    """Return a provider's relative error against float64, by tensor.

    The error is the Frobenius norm of the difference over the norm of the truth, or over the size
    that the truth names; infinity where a value is not finite, or has another shape or dtype than
    it should.

    Args:
        bind: Binds the provider to inputs.
        inputs: The inputs.
        grad_outputs: The gradients of the outputs.
        exact: What float64 gives.
        gradients: Whether to run what training runs, or what inference does.

    Raises:
        ValueError: If it returns more or fewer tensors than the op has outputs.
    """
    bound, dtype = bind(inputs), inputs[0].dtype
    with torch.set_grad_enabled(gradients):
        ys = listed(bound.call())
    if len(ys) != len(exact.outputs):
        raise ValueError(f"returned {len(ys)} tensors, expected {', '.join(exact.outputs)}")
    found = {
        name: _error(y, value, dtype)
        for y, (name, value) in zip(ys, exact.outputs.items(), strict=True)
    }
    if gradients:
        computed = torch.autograd.grad(ys, bound.leaves, grad_outputs, allow_unused=True)
        for gradient, (name, wanted) in zip(computed, exact.gradients.items(), strict=True):
            if wanted is not None:
                found[f"grad_{name}"] = _error(gradient, wanted, dtype, exact.sizes.get(name))
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


def _error(
    value: Tensor | None, exact: Tensor, dtype: torch.dtype, size: float | None = None
) -> float:
    if value is None or value.shape != exact.shape or value.dtype is not dtype:
        return float("inf")
    difference = float((value.detach().double() - exact).norm())
    if difference != difference:
        return float("inf")
    scale = float(exact.norm()) if size is None else size
    return difference / scale if scale else difference
