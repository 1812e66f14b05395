"""Any GPU: our norm kernels around PyTorch's products.

Under autocast x may be float32 beside narrower Linear parameters: normalized rows are then rounded
once, to the type of the product.

Everything runs on PyTorch's current stream. Nothing here synchronizes, and all memory comes from
PyTorch's allocator, so calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.call.memory import (
    LOW_PRECISION,
    address,
    dense,
    empty_gradients,
    empty_statistics,
    workspace,
)
from fused_norm.call.parameters import Parameters
from fused_norm.native import build, runtime

_DTYPES = LOW_PRECISION | {torch.float32}


def accepts(x: Tensor, parameters: Parameters) -> bool:
    """Return whether x is on a GPU, in the dtype of the weight or float32 beside a narrower one."""
    if not x.is_cuda or x.dtype not in _DTYPES:
        return False
    is_narrow = x.dtype is torch.float32 and parameters.layout.dtype in LOW_PRECISION
    return x.dtype is parameters.layout.dtype or is_narrow


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, and mean and rstd if asked for."""
    z = torch.empty_like(x, dtype=parameters.layout.dtype)
    mean, rstd = empty_statistics(x, parameters.has_mean) if statistics else (None, None)
    kernels, context = launcher("passes_gpu", x)
    call = parameters.call(x, eps)
    call.context = context
    call.z, call.mean, call.rstd = z.data_ptr(), address(mean), address(rstd)
    kernels.normalize(ctypes.addressof(call))
    _, _, weight, bias = parameters.tensors
    return F.linear(z, weight, bias), mean, rstd


def backward(
    grad_output: Tensor,
    x: Tensor,
    parameters: Parameters,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
    wanted: list[bool],
    main_grad: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients that are wanted."""
    want_dx, want_dgamma, want_dbeta, want_dweight, want_dbias = wanted
    grad_output, x = dense(grad_output, x)
    weight = parameters.tensors[2]
    kernels, context = launcher("passes_gpu", x)
    call = parameters.call(x, eps)
    place = ctypes.addressof(call)
    dy = grad_output.view(call.M, parameters.layout.N)
    gradients = empty_gradients(x, parameters, [*wanted[:3], False, want_dbias])
    call.dx, call.dgamma, call.dbeta, _, call.dbias = map(address, gradients)
    dz = None
    if want_dx or want_dgamma or want_dbeta:
        # The kernel reads dz as it reads x.
        product = functools.partial(torch.mm, out_dtype=x.dtype) if call.narrow else torch.mm
        dz = product(dy, weight)
    # Not kept from the forward: one more result of the pass over x costs less than a second x in
    # memory. It takes the place of dz, which that pass is the last to need.
    z = None
    if want_dweight:
        z = weight.new_empty(call.M, parameters.layout.K) if dz is None or call.narrow else dz
    call.context = context
    call.dy, call.mean, call.rstd = dy.data_ptr(), address(mean), rstd.data_ptr()
    call.dz, call.z = address(dz), address(z)
    kernels.plan_normalize_backward(place)
    size: int = call.workspace_bytes
    scratch = workspace(size, x.device) if size else None
    call.workspace = address(scratch)
    kernels.normalize_backward(place)
    if z is not None and main_grad is not None:
        torch.addmm(main_grad, dy.t(), z, out_dtype=main_grad.dtype, out=main_grad)
    elif z is not None:
        gradients[3] = torch.mm(dy.t(), z)
    return gradients


def library(name: str, x: Tensor) -> str:
    """Return the file of an extension for a tensor's dtype and device."""
    accelerator = build.accelerator_of(x.device)
    return str(build.Extension(name, build.DTYPES[x.dtype], accelerator).path)


def launcher(name: str, x: Tensor) -> tuple[ModuleType, int]:
    """Return an extension for a tensor's dtype, and its context on the device's current stream."""
    device = x.device.index
    return _launcher(name, x.dtype, device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _launcher(name: str, dtype: torch.dtype, device: int, stream: int) -> tuple[ModuleType, int]:
    accelerator = build.accelerator_of(torch.device("cuda", device))
    kernels = build.load(build.Extension(name, build.DTYPES[dtype], accelerator))
    return kernels, runtime.new_launcher(kernels, device, stream, True)
