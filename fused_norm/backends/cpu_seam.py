"""The op family on a CPU in one native call: a product between a norm and an activation."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_norm.backends import cpu, passes
from fused_norm.call.memory import address, dense, empty_statistics
from fused_norm.call.record import FUSED
from fused_norm.call.results import Results
from fused_norm.composition import Operands, Seam, has_sum, is_gate


def forward(kind: Seam, t: Operands, keeps: bool) -> Results | None:
    """Compute a call of one weight but for its second Linear layer; None where that is declined.

    Args:
        kind: What to compute.
        t: Valid tensors, none of them empty.
        keeps: Whether a backward follows.
    """
    x, weight, bias = dense(t.x, t.weights[0], t.biases[0])
    call, kept = passes.norm_call(kind, t, x, x.dtype)
    kernels = cpu.extension("norm_linear_cpu", x.dtype)
    products = weight.shape[0]
    call.N = products // 2 if is_gate(kind.activation) else products
    total = torch.empty_like(x, memory_format=torch.contiguous_format) if has_sum(t) else None
    mean, rstd = empty_statistics(x, kind.normalization == "layer_norm") if keeps else (None, None)
    h = None
    if keeps and kind.activation and not kind.recompute:
        h = x.new_empty(*x.shape[:-1], products)
    y = x.new_empty(*x.shape[:-1], call.N)
    call.weight, call.bias, call.y, call.h = map(address, (weight, bias, y, h))
    call.sum, call.mean, call.rstd = map(address, (total, mean, rstd))
    call.activation = passes.number_of(kind.activation)
    call.way, call.invariant = cpu.asked_way(), kind.batch_invariant
    place = ctypes.addressof(call)
    kernels.plan_forward(place)
    if call.way != FUSED:
        return None
    size: int = call.workspace_bytes
    scratch = cpu.scratch(size) if size else None
    call.workspace = address(scratch)
    kernels.forward(place)
    del kept
    return Results(
        [y],
        total if keeps or kind.returns_sum else None,
        None,
        mean,
        rstd,
        [] if h is None else [h],
    )


def backward(
    kind: Seam, t: Operands, dh: Tensor, dsum: Tensor | None, wanted: Sequence[bool]
) -> list[Tensor | None] | None:
    """Return the gradients of a norm and one Linear layer; None where that is declined.

    Args:
        kind: What was computed.
        t: The tensors, x being the sum where there was a residual, statistics included.
        dh: Gradient of the product, of shape `[M, N]`.
        dsum: Gradient that reaches the sum besides, or None.
        wanted: Whether those of x, gamma, beta, the weight and the bias are.
    """
    x, weight, dsum = dense(t.x, t.weights[0], dsum)
    call, kept = passes.norm_call(kind, t, x, x.dtype)
    kernels = cpu.extension("norm_linear_cpu", x.dtype)
    call.N = weight.shape[0]
    call.weight, call.dy, call.dsum = map(address, (weight, dh, dsum))
    call.dx, call.dgamma, call.dbeta, call.dweight, call.dbias = wanted
    call.way, call.invariant = cpu.asked_way(), kind.batch_invariant
    place = ctypes.addressof(call)
    kernels.plan_backward(place)
    if call.way != FUSED:
        return None
    gradients: list[Tensor | None] = [
        torch.empty_like(like, memory_format=torch.contiguous_format) if wants else None
        for like, wants in zip((x, t.gamma, t.beta, weight), wanted, strict=False)
    ]
    gradients.append(weight.new_empty(weight.shape[0]) if wanted[4] else None)
    call.dx, call.dgamma, call.dbeta, call.dweight, call.dbias = map(address, gradients)
    size: int = call.workspace_bytes
    scratch = cpu.scratch(size) if size else None
    call.workspace = address(scratch)
    kernels.backward(place)
    del kept
    return gradients
