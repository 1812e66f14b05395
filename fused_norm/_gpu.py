"""The composed way on any GPU: our LayerNorm kernels around PyTorch's GEMMs.

Under autocast x may be float32 beside narrower Linear parameters: normalised rows are then rounded
once, to the type of the product.

All runs on PyTorch's current stream. Nothing here synchronises, and all memory comes from PyTorch's
allocator, so calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
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


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y of shape `[..., N]`, and mean and rstd of shape `[...]` if asked for."""
    features = parameters.features
    z = torch.empty_like(x, dtype=parameters.dtype)
    mean, rstd = empty_statistics(x) if statistics else (None, None)
    launcher("norm_linear_gpu", x).layernorm_forward(
        z.data_ptr(),
        address(mean),
        address(rstd),
        x.data_ptr(),
        parameters.ln_weight,
        parameters.ln_bias,
        x.numel() // features,
        features,
        eps,
        x.dtype is not torch.float32 and parameters.affine_is_float32,
        _narrow(x.dtype, parameters.dtype),
    )
    _, _, weight, bias = parameters.tensors()
    return F.linear(z, weight, bias), mean, rstd


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
    main_grad: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the gradients that the mask asks for, None in place of the others.

    Where there is a `main_grad` `[N, K]` in float32, the weight's gradient is added to it instead.
    """
    outputs, features = linear_weight.shape
    rows = x.numel() // features
    grad_output, x, ln_weight, ln_bias = dense(grad_output, x, ln_weight, ln_bias)
    want_dx, want_dgamma, want_dbeta, want_dweight, want_dbias = mask
    want_parameters = want_dgamma or want_dbeta
    dy = grad_output.view(rows, outputs)
    kernels = launcher("norm_linear_gpu", x)
    gradients = empty_gradients(
        x, ln_weight, ln_bias, linear_weight, [*mask[:3], False, want_dbias]
    )
    dx, dgamma, dbeta, _, dbias = map(address, gradients)
    narrow = _narrow(x.dtype, linear_weight.dtype)
    dz = None
    if want_dx or want_parameters:
        # The kernel reads dz as it reads x.
        product = functools.partial(torch.mm, out_dtype=x.dtype) if narrow else torch.mm
        dz = product(dy, linear_weight)
    # Not kept from the forward: one more result of the pass over x costs less than a second x in
    # memory. It takes the place of dz, which that pass is the last to need.
    z = None
    if want_dweight:
        z = linear_weight.new_empty(rows, features) if dz is None or narrow else dz
    size = _workspace_size(
        kernels, rows, features if want_parameters else 0, outputs if want_dbias else 0
    )
    scratch = workspace(size, x.device) if size else None
    kernels.backward(
        *(dx, dgamma, dbeta, dbias, address(z), address(dz)),
        *(dy.data_ptr(), x.data_ptr(), address(ln_weight), address(ln_bias)),
        *(mean.data_ptr(), rstd.data_ptr(), address(scratch)),
        *(rows, features, outputs, eps),
        x.dtype is not torch.float32 and affine_is_float32(ln_weight, ln_bias),
        narrow,
    )
    if z is not None and main_grad is not None:
        torch.addmm(main_grad, dy.t(), z, out_dtype=main_grad.dtype, out=main_grad)
    elif z is not None:
        gradients[3] = torch.mm(dy.t(), z)
    return gradients


def functions(x: Tensor, parameters: Parameters) -> None:
    """Return None: PyTorch's products are no function of ours."""


def _narrow(dtype: torch.dtype, product_dtype: torch.dtype) -> int:
    """Return the kernels' number for the type of the product, 0 where it is that of x."""
    return 0 if dtype is product_dtype else 1 if product_dtype is torch.bfloat16 else 2


@functools.lru_cache(maxsize=4096)
def _workspace_size(kernels: Any, rows: int, features: int, outputs: int) -> int:
    """Return the bytes that a backward needs, asked for once a shape."""
    size: int = kernels.backward_workspace(rows, features, outputs)
    return size


def launcher(name: str, x: Tensor) -> Any:
    """Return an extension's launcher for a tensor's dtype, on its device's current stream."""
    device = x.device.index
    return _launcher(name, x.dtype, device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _launcher(name: str, dtype: torch.dtype, device: int, stream: int) -> Any:
    accelerator = _native.accelerator_of(torch.device("cuda", device))
    extension = _native.Extension(name, _native.DTYPES[dtype], accelerator)
    return _native.load(extension).Launcher(device, stream)
