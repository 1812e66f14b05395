"""Runs the row passes of op/passes on a CPU or on a GPU's current stream: one native call each.

Tensors are dense and not empty. Nothing synchronizes, and all memory comes from PyTorch's
allocators, so calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fused_norm.backends import cpu, gpu
from fused_norm.call.memory import address, dense, workspace
from fused_norm.call.record import Call
from fused_norm.composition import ACTIVATIONS, NORMALIZATIONS, Operands, Seam
from fused_norm.native import build

Door = Callable[[int], int]


def normalize(
    kind: Seam,
    t: Operands,
    x: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    z: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> None:
    """Write whichever are given of x + residual, its normalized rows and their statistics.

    Args:
        kind: Which norm.
        t: Its parameters, and its statistics if they are known.
        x: Input of shape `[..., K]`.
        residual: Added to x, or None.
        total: Receives the sum.
        z: Receives the normalized and modulated rows, in its own dtype.
        mean: Receives the mean of each row.
        rstd: Receives the factor of each row.
    """
    call, parameters = norm_call(kind, t, x, x.dtype if z is None else z.dtype)
    kernels = _kernels(x)
    given = dense(t.mean, t.rstd)
    if t.rstd is not None:
        call.has_statistics = 1
        call.mean, call.rstd = map(address, given)
    else:
        call.mean, call.rstd = address(mean), address(rstd)
    call.residual, call.sum, call.z = map(address, (residual, total, z))
    _run(kernels.plan_normalize, kernels.normalize, call, x)
    del given, parameters


def normalize_backward(
    kind: Seam,
    t: Operands,
    dz: Tensor | None,
    *,
    dsum: Tensor | None = None,
    z: Tensor | None = None,
    dy: Tensor | None = None,
    dx: Tensor | None = None,
    dgamma: Tensor | None = None,
    dbeta: Tensor | None = None,
    dscale: Tensor | None = None,
    dshift: Tensor | None = None,
    dbias: Tensor | None = None,
) -> None:
    """Write whichever are given of the gradients and, once more, the normalized rows.

    Args:
        kind: Which norm.
        t: Its parameters, its statistics, and for x the sum that was normalized.
        dz: Gradient of the normalized rows, in the dtype of x; not needed for z alone.
        dsum: Gradient that reaches the sum besides, added to dx.
        z: Receives the normalized rows, in the dtype of the weights; may be dz if that is the same.
        dy: Gradient of a product, in the dtype of the weights; needed for dbias.
        dx: Receives the gradient of the sum.
        dgamma: Receives that of gamma.
        dbeta: Receives that of beta.
        dscale: Receives that of the scale.
        dshift: Receives that of the shift.
        dbias: Receives the sum over the rows of dy.
    """
    x, mean, rstd = dense(t.x, t.mean, t.rstd)
    call, parameters = norm_call(kind, t, x, t.weights[0].dtype)
    kernels = _kernels(x)
    call.mean, call.rstd, call.dz, call.dsum = map(address, (mean, rstd, dz, dsum))
    call.z, call.dx = address(z), address(dx)
    call.dgamma, call.dbeta = address(dgamma), address(dbeta)
    call.dscale, call.dshift = address(dscale), address(dshift)
    if dy is not None:
        call.N, call.dy, call.dbias = dy.shape[-1], dy.data_ptr(), address(dbias)
    _run(kernels.plan_normalize_backward, kernels.normalize_backward, call, x)
    del parameters


def activate(activation: str, h: Tensor, a: Tensor) -> None:
    """Write the activation of h to a.

    Args:
        activation: One of ACTIVATIONS.
        h: Of shape `[..., N]`, for a gate `[..., 2N]`.
        a: Of shape `[..., N]`.
    """
    call = _activation_call(activation, a)
    kernels = _kernels(a)
    call.h, call.a = h.data_ptr(), a.data_ptr()
    kernels.activate(ctypes.addressof(call))


def activate_backward(
    activation: str,
    h: Tensor | None,
    da: Tensor,
    *,
    dh: Tensor | None = None,
    a: Tensor | None = None,
    dbias: Tensor | None = None,
) -> None:
    """Write whichever are given of the gradient of h, its activation once more, and sums over rows.

    Args:
        activation: One of ACTIVATIONS; or `""`, for the sums over the rows of da alone.
        h: Of shape `[..., N]`, for a gate `[..., 2N]`; None without activation.
        da: Gradient of its activation, shape `[..., N]`.
        dh: Receives the gradient of h.
        a: Receives the activation of h.
        dbias: Receives the sum over the rows of the gradient of h.
    """
    call = _activation_call(activation, da)
    kernels = _kernels(da)
    call.da, call.h, call.dh, call.a, call.dbias = map(address, (da, h, dh, a, dbias))
    _run(kernels.plan_activate_backward, kernels.activate_backward, call, da)


def norm_call(
    kind: Seam, t: Operands, x: Tensor, product: torch.dtype
) -> tuple[Call, tuple[Tensor | None, ...]]:
    """Return a record with the norm's half filled in, and what has to outlive the call.

    Args:
        kind: Which norm.
        t: Its parameters.
        x: What is normalized.
        product: The dtype of the normalized rows.
    """
    parameters = dense(t.gamma, t.beta, t.scale, t.shift)
    call = _call(x)
    call.x, call.eps, call.weight_offset = x.data_ptr(), kind.eps, kind.weight_offset
    call.normalization = NORMALIZATIONS.index(kind.normalization)
    call.gamma, call.beta, call.scale, call.shift = map(address, parameters)
    modulation = t.scale if t.scale is not None else t.shift
    if modulation is not None:
        call.groups = modulation.numel() // call.K
    affine = t.gamma if t.gamma is not None else t.beta
    if product is not x.dtype:
        call.narrow = 1 if product is torch.bfloat16 else 2
    elif affine is not None and affine.dtype is not x.dtype:
        call.norm_is_float32 = 1
    return call, parameters


def number_of(activation: str) -> int:
    """Return the number of an activation in the record.

    Args:
        activation: One of ACTIVATIONS, or `""` for none.
    """
    return ACTIVATIONS[activation][0] if activation else 0


def _activation_call(activation: str, a: Tensor) -> Call:
    call = _call(a)
    call.N, call.K = call.K, 0
    call.activation = number_of(activation)
    return call


def _call(rows: Tensor) -> Call:
    """Return a record of the sizes of some rows, and of where they are."""
    call = Call()
    call.K = rows.shape[-1]
    call.M = rows.numel() // call.K
    if rows.is_cuda:
        call.context = gpu.launcher("passes_gpu", rows)[1]
    else:
        call.context, call.threads = build.gomp_parallel(), cpu.threads()
    return call


def _kernels(rows: Tensor) -> ModuleType:
    if rows.is_cuda:
        return gpu.launcher("passes_gpu", rows)[0]
    return cpu.extension("passes_cpu", rows.dtype)


def _run(plan: Door, run: Door, call: Call, like: Tensor) -> None:
    place = ctypes.addressof(call)
    plan(place)
    size: int = call.workspace_bytes
    scratch = workspace(size, like.device) if size else None
    call.workspace = address(scratch)
    run(place)
