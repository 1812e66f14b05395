"""The fused way on a CPU: one GEMM that normalises rows as it packs them, on PyTorch's threads."""

from __future__ import annotations

import functools
import os
import threading
from types import ModuleType

import torch
from torch import Tensor

from fused_norm import _native
from fused_norm._memory import (
    address,
    affine_is_float32,
    dense,
    empty_gradients,
    empty_statistics,
    workspace,
)
from fused_norm._parameters import Parameters

_forked = False
_kept = threading.local()
_KEPT_BYTES = 1 << 25


def threads() -> int:
    """Return how many threads a kernel may use: PyTorch's setting, or 1 after a fork.

    libgomp's workers do not survive a fork, and waiting for them would hang.
    """
    return 1 if _forked else torch.get_num_threads()


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y of shape `[..., N]`, and mean and rstd of shape `[...]` if asked for."""
    kernels = extension("norm_linear_cpu", x.dtype)
    outputs, features = parameters.outputs, parameters.features
    sizes = (x.numel() // features, features, outputs, threads())
    y = x.new_empty(*x.shape[:-1], outputs)
    mean, rstd = empty_statistics(x) if statistics else (None, None)
    size = kernels.forward_workspace(*sizes)
    scratch = _scratch(size) if size else None
    kernels.forward(
        *sizes,
        _native.gomp_parallel(),
        0 if scratch is None else scratch.data_ptr(),
        x.dtype is not torch.float32 and parameters.affine_is_float32,
        eps,
        y.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        0 if rstd is None else rstd.data_ptr(),
        x.data_ptr(),
        parameters.ln_weight,
        parameters.ln_bias,
        parameters.weight,
        parameters.bias,
    )
    return y, mean, rstd


def backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    mask: list[bool],
) -> list[Tensor | None]:
    """Return the gradients that the mask asks for, None in place of the others."""
    kernels = extension("norm_linear_cpu", x.dtype)
    outputs, features = linear_weight.shape
    sizes = (x.numel() // features, features, outputs, threads())
    grad_output, x, ln_weight, ln_bias, linear_weight = dense(
        grad_output, x, ln_weight, ln_bias, linear_weight
    )
    gradients = empty_gradients(x, ln_weight, ln_bias, linear_weight, mask)
    addresses = [address(gradient) for gradient in gradients]
    scratch = _scratch(kernels.backward_workspace(*sizes, *addresses))
    kernels.backward(
        *sizes,
        _native.gomp_parallel(),
        address(scratch),
        x.dtype is not torch.float32 and affine_is_float32(ln_weight, ln_bias),
        *addresses,
        grad_output.data_ptr(),
        x.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        address(ln_weight),
        address(ln_bias),
        linear_weight.data_ptr(),
    )
    return gradients


def functions(x: Tensor, parameters: Parameters) -> tuple[int, ...]:
    """Return the addresses of both passes' functions, and of the threads they share."""
    return _functions(parameters.dtype)


@functools.cache
def _functions(dtype: torch.dtype) -> tuple[int, ...]:
    kernels = _native.Extension("norm_linear_cpu", _native.DTYPES[dtype])
    return *_native.functions(kernels), _native.gomp_parallel()


def _scratch(size: int) -> Tensor:
    """Return memory for a call: that of the thread's calls before, if it is not too large to keep.

    Fresh memory would cost a page fault for every 4 KiB. PyTorch's own products keep theirs, too.
    """
    kept: Tensor | None = getattr(_kept, "memory", None)
    if kept is not None and kept.numel() >= size:
        return kept
    memory = workspace(size, torch.device("cpu"))
    if size <= _KEPT_BYTES:
        _kept.memory = memory
    return memory


@functools.cache
def extension(name: str, dtype: torch.dtype) -> ModuleType:
    """Return the kernels of an extension for a dtype."""
    return _native.load(_native.Extension(name, _native.DTYPES[dtype]))


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
