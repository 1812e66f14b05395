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
from fused_norm.composition import ACTIVATIONS, FORMS, NORMALIZATIONS, Operands, Seam, first
from fused_norm.native import build

Door = Callable[[int], int]


def normalize(
    kind: Seam,
    t: Operands,
    x: Tensor,
    *,
    total: Tensor | None = None,
    z: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> None:
    """Write whichever are given of x + residual, its normalized rows and their statistics.

    Args:
        kind: Which norm.
        t: What comes with it, its statistics included if they are known.
        x: Input of shape `[..., K]`.
        total: Receives the sum.
        z: Receives the normalized and modulated rows, in its own dtype.
        mean: Receives the mean of each row.
        rstd: Receives the factor of each row.
    """
    call, kept = norm_call(kind, t, x, x.dtype if z is None else z.dtype)
    kernels = _kernels(x)
    call.has_statistics = t.rstd is not None
    if not call.has_statistics:
        call.mean, call.rstd = address(mean), address(rstd)
    call.sum, call.z = address(total), address(z)
    _run(kernels.plan_normalize, kernels.normalize, call, x)
    del kept


def normalize_backward(
    kind: Seam,
    t: Operands,
    dz: Tensor | None,
    *,
    dsum: Tensor | None = None,
    z: Tensor | None = None,
    dy: Tensor | None = None,
    dbias: Tensor | None = None,
    gradients: dict[str, Tensor] | None = None,
) -> None:
    """Write whichever are given of the gradients and, once more, the normalized rows.

    Args:
        kind: Which norm.
        t: Its parameters, its statistics, and for x the sum that was normalized.
        dz: Gradient of the normalized rows, in the dtype of x; not needed for z alone.
        dsum: Gradient that reaches the sum besides, added to dx.
        z: Receives the normalized rows, in the dtype of the weights; may be dz if that is the same.
        dy: Gradient of a product, in the dtype of the weights; needed for dbias.
        dbias: Receives the sum over the rows of dy.
        gradients: By their operands' names, receive those of the sum (x) and of what comes with it.
    """
    (x,) = dense(t.x)
    call, kept = norm_call(kind, t, x, t.weights[0].dtype)
    kernels = _kernels(x)
    call.dz, call.dsum, call.z = map(address, (dz, dsum, z))
    for name, gradient in (gradients or {}).items():
        setattr(call, f"d{name}", gradient.data_ptr())
    if dy is not None:
        call.N, call.dy, call.dbias = dy.shape[-1], dy.data_ptr(), address(dbias)
    _run(kernels.plan_normalize_backward, kernels.normalize_backward, call, x)
    del kept


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
    """Return a record of a norm and what comes with it, and what has to outlive the call.

    Args:
        kind: Which norm.
        t: What comes with it.
        x: What is normalized.
        product: The dtype of the normalized rows.
    """
    kept = dense(*(getattr(t, name) for name in FORMS))
    call = _call(x)
    call.x, call.eps, call.weight_offset = x.data_ptr(), kind.eps, kind.weight_offset
    call.normalization = NORMALIZATIONS.index(kind.normalization)
    for name, operand in zip(FORMS, kept, strict=True):
        if operand is not None:
            setattr(call, name, operand.data_ptr())
    if (modulation := first(t, "groups")) is not None:
        call.groups = modulation.numel() // call.K
    affine = first(t, "features")
    if product is not x.dtype:
        call.narrow = 1 if product is torch.bfloat16 else 2
    elif affine is not None and affine.dtype is not x.dtype:
        call.norm_is_float32 = 1
    return call, kept


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
