"""The row programs: LayerNorm with a trained eps, and LayerNorm as three ops, on CPU and GPU.

M rows of K elements. All outputs are new, dense tensors; on a GPU all runs on PyTorch's current
stream, and nothing synchronises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_norm.backends import cpu, gpu
from fused_norm.call.memory import address, dense, statistics_dtype
from fused_norm.native import build


def trainable_eps_forward(x: Tensor, o: Tensor) -> Tensor:
    """Return v / sqrt(o o + mean(v v)) with v = x - mean(x)."""
    (x,) = dense(x)
    y = torch.empty_like(x)
    if x.numel():
        o = o.resolve_neg()
        o_float32 = o.dtype is torch.float32
        addresses = (y.data_ptr(), x.data_ptr(), o.data_ptr())
        _run("trainable_eps_forward", x, *addresses, *_sizes(x), o_float32)
    return y


def trainable_eps_backward(
    grad_output: Tensor, x: Tensor, o: Tensor, mask: list[bool]
) -> list[Tensor | None]:
    """Return the gradients of x and of o, None for each that the mask leaves out."""
    want_dx, want_do = mask
    grad_output, x = dense(grad_output, x)
    dx = torch.empty_like(x) if want_dx else None
    if not x.numel():
        return [dx, o.new_zeros(o.shape) if want_do else None]
    o = o.resolve_neg()
    rows, length = _sizes(x)
    do = o.new_empty(o.shape) if want_do else None
    scratch = x.new_empty(rows, dtype=statistics_dtype(x.dtype)) if want_do else None
    tensors = (dx, do, grad_output, x, o, scratch)
    o_float32 = o.dtype is torch.float32
    _run("trainable_eps_backward", x, *_addresses(*tensors), rows, length, o_float32, False)
    return [dx, do]


def mean(x: Tensor) -> Tensor:
    """Return x without the mean of each row."""
    (x,) = dense(x)
    y = torch.empty_like(x)
    if x.numel():
        _run("mean", x, *_addresses(y, x), *_sizes(x), False)
    return y


def norm_forward(v: Tensor) -> Tensor:
    """Return sqrt(mean(v v)) for every element."""
    (v,) = dense(v)
    y = torch.empty_like(v)
    if v.numel():
        _run("norm_forward", v, *_addresses(y, v), *_sizes(v))
    return y


def norm_backward(grad_output: Tensor, v: Tensor) -> Tensor:
    """Return the gradient of v."""
    grad_output, v = dense(grad_output, v)
    dv = torch.empty_like(v)
    if v.numel():
        _run("norm_backward", v, *_addresses(dv, grad_output, v), *_sizes(v), False)
    return dv


def div_forward(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b."""
    a, b = dense(a, b)
    y = torch.empty_like(a)
    if a.numel():
        _run("div_forward", a, *_addresses(y, a, b), *_sizes(a))
    return y


def div_backward(
    grad_output: Tensor, a: Tensor, b: Tensor, mask: list[bool]
) -> list[Tensor | None]:
    """Return the gradients of a and b, None for each that the mask leaves out."""
    grad_output, a, b = dense(grad_output, a, b)
    da, db = (torch.empty_like(a) if wanted else None for wanted in mask)
    if a.numel():
        _run("div_backward", a, *_addresses(da, db, grad_output, a, b), *_sizes(a), False)
    return [da, db]


def _run(name: str, x: Tensor, *arguments: int) -> None:
    """Run a kernel for the dtype and on the device of `x`."""
    if x.is_cpu:
        kernels = cpu.extension("rows_cpu", x.dtype)
        getattr(kernels, name)(*arguments, cpu.threads(), build.gomp_parallel())
    else:
        getattr(gpu.launcher("rows_gpu", x), name)(*arguments)


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(map(address, tensors))


def _sizes(x: Tensor) -> tuple[int, int]:
    """Return the number of rows and of the elements of a row."""
    length = x.shape[-1]
    return x.numel() // length, length
