"""A norm alone, with the passes that run around products; one pass computes all its gradients.

Gradients reread what the forward normalized, and its statistics.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_norm.call.memory import LOW_PRECISION, ORDINARY, address, statistics_dtype
from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.composition import Operands, Spec
from fused_norm.native import build
from fused_norm.norms import NORMS

# Whether the passes compute the head's norm; tests and measurements compare with PyTorch's.
OWN_NORM = True


class Rows(NamedTuple):
    """Results of a forward.

    Attributes:
        z: The normalized rows.
        sum: What was normalized: x, or the sum of x and a residual.
        mean: One for each row, None for a norm without a mean.
        rstd: One for each row.
    """

    z: Tensor
    sum: Tensor
    mean: Tensor | None
    rstd: Tensor


def serves(t: Operands) -> bool:
    """Return whether the passes compute a norm: on Hopper, in 16 bits.

    Args:
        t: Whatever a user passed as x, the residual, gamma and beta.
    """
    given = (t.x, t.residual, t.gamma, t.beta)
    if not OWN_NORM or not ORDINARY.issuperset(map(type, given)) or t.x is None:
        return False
    return _fits(t) and t.x.is_cuda and kernels.is_hopper(t.x.device.index or 0)


def _fits(t: Operands) -> bool:
    x, features = t.x, [v for v in (t.gamma, t.beta) if v is not None]
    return (
        x.dtype in LOW_PRECISION
        and x.dim() > 0
        and x.numel() > 0
        and x.layout is torch.strided
        and not torch._C._is_any_autocast_enabled()
        and (t.residual is None or (t.residual.shape, t.residual.dtype) == (x.shape, x.dtype))
        and all(v.shape == x.shape[-1:] and v.dtype in (x.dtype, torch.float32) for v in features)
        and len({v.dtype for v in features}) <= 1
        and all(v is None or v.device == x.device for v in (t.residual, *features))
        and build.is_at_hand(x.device, x.dtype)
    )


def forward(spec: Spec, t: Operands) -> Rows:
    """Return the normalized rows, and what their gradients need.

    Args:
        spec: The norm.
        t: Tensors that `serves` takes.
    """
    x, residual, gamma, beta = kernels.in_aligned_memory(t.x, t.residual, t.gamma, t.beta)
    rows, wide = x.shape[:-1], statistics_dtype(x.dtype)
    z = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    mean = x.new_empty(rows, dtype=wide) if NORMS[spec.normalization].has_mean else None
    rstd = x.new_empty(rows, dtype=wide)
    module, call = _call(spec, x, gamma, beta)
    call.residual, call.z = address(residual), address(z)
    call.sum = address(total) if residual is not None else 0
    call.mean, call.rstd = address(mean), address(rstd)
    module.normalize(ctypes.addressof(call))
    return Rows(z, t.x if residual is None else total, mean, rstd)


def backward(
    spec: Spec, dz: Tensor, found: Rows, t: Operands, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the sum, gamma and beta, None for those that are not wanted.

    Args:
        spec: The norm.
        dz: The gradient of the normalized rows.
        found: The result of the forward; its normalized rows are not needed.
        t: Gamma and beta.
        wanted: Which gradients.
    """
    dz, x, gamma, beta = kernels.in_aligned_memory(dz, found.sum, t.gamma, t.beta)
    made = zip((x, gamma, beta), wanted, strict=True)
    gradients = [v.new_empty(v.shape) if w else None for v, w in made]
    module, call = _call(spec, x, gamma, beta)
    call.dz, call.mean, call.rstd = address(dz), address(found.mean), address(found.rstd)
    call.dx, call.dgamma, call.dbeta = map(address, gradients)
    module.plan_normalize_backward(ctypes.addressof(call))
    # Freed in the stream's order.
    workspace = dz.new_empty(call.workspace_bytes, dtype=torch.uint8)
    call.workspace = address(workspace)
    module.normalize_backward(ctypes.addressof(call))
    dx, dgamma, dbeta = gradients
    return dx, dgamma, dbeta


def _call(spec: Spec, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Any, Call]:
    module, context, threads = kernels.passes_for(x)
    K = x.shape[-1]
    call = Call(M=x.numel() // K, K=K, eps=spec.eps, context=context, threads=threads)
    call.x, call.gamma, call.beta = address(x), address(gamma), address(beta)
    call.normalization = NORMS[spec.normalization].number
    call.weight_offset = spec.weight_offset
    features = gamma if gamma is not None else beta
    call.norm_is_float32 = features is not None and features.dtype is not x.dtype
    return module, call
