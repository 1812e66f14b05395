"""A norm alone as an autograd function, for calls that only autograd sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm import composition
from fused_norm.chain import normalize
from fused_norm.composition import Operands, Spec
from fused_norm.ops.registration import is_watched


class NormalizeFunction(torch.autograd.Function):
    """The normalized rows of x and a residual, and their sum; gradients of both, gamma and beta."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the rows, and the sum, which is a result to allow second derivatives."""
        found = normalize.forward(spec, Operands(x, residual, gamma, beta))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(found.sum, found.mean, found.rstd, gamma, beta)
        ctx.spec = spec
        return (found.z,) if residual is None else (found.z, found.sum)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dsum: Tensor | None = None) -> Any:
        """Return the gradients that are required."""
        of_x, of_residual, *of_parameters = ctx.needs_input_grad[1:]
        wanted = (of_x or of_residual, *of_parameters)
        found: Any = [dsum, None, None]
        if dz is not None:
            total, mean, rstd, gamma, beta = ctx.saved_tensors
            t = Operands(total, None, gamma, beta)
            if torch.is_grad_enabled() or is_watched():
                found = _derived(ctx.spec, dz, t, wanted)
            else:
                rows = normalize.Rows(dz, total, mean, rstd)
                found = normalize.backward(ctx.spec, dz, rows, t, wanted)
        dx, dgamma, dbeta = found
        if dz is not None and dsum is not None and dx is not None:
            dx = dx + dsum
        return None, dx if of_x else None, dx if of_residual else None, dgamma, dbeta


def _derived(spec: Spec, dz: Tensor, t: Operands, wanted: tuple[bool, ...]) -> list[Tensor | None]:
    """Return gradients that can be differentiated again."""
    names = [n for n, w in zip(("x", "gamma", "beta"), wanted, strict=True) if w]

    def run(*values: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(names, values, strict=True))
        changed = t._replace(**given)
        return composition.normalized(spec, changed.x, changed)

    pull = torch.func.vjp(run, *(getattr(t, n) for n in names))[1]
    found = dict(zip(names, pull(dz), strict=True))
    return [found.get(n) for n in ("x", "gamma", "beta")]


def normalized(spec: Spec, t: Operands) -> Tensor:
    """Return the normalized rows of x plus the residual, in the dtype of x.

    Args:
        spec: The norm.
        t: Whatever a user passed as x, the residual, gamma, beta and the weight.
    """
    if is_watched() or not normalize.serves(t):
        return composition.normalized(spec, composition.summed(t), t)
    tensors = (t.x, t.residual, t.gamma, t.beta)
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in tensors):
        z: Tensor = NormalizeFunction.apply(spec, *tensors)[0]
        return z
    return normalize.forward(spec, t).z
