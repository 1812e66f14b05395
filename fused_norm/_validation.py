"""Decides whether the kernels serve a call.

What they do not serve, a wrong call included, is handed to PyTorch's own `layer_norm` and `linear`:
so an error has PyTorch's type and words, and whatever PyTorch accepts works.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm._dispatch import LOW_PRECISION, serves


def has_kernel(
    x: Any,
    ln_weight: Any,
    ln_bias: Any,
    linear_weight: Any,
    linear_bias: Any,
    eps: Any,
    autocast: bool = False,
) -> bool:
    """Return whether the kernels serve a call of `fused_layernorm_linear`.

    Args:
        x: Should be a tensor of shape `[..., K]` in a dtype that has kernels.
        ln_weight: Should be None or a tensor of shape `[K]`, in the dtype of `x` or float32.
        ln_bias: Should be None or a tensor of shape `[K]`, in the dtype of `ln_weight`.
        linear_weight: Should be a tensor of shape `[N, K]` in the dtype of `x`.
        linear_bias: Should be None or a tensor of shape `[N]` in the dtype of `linear_weight`.
        eps: Should be a number.
        autocast: Whether autocast gave the Linear parameters their dtype.
    """
    if not (isinstance(x, Tensor) and isinstance(linear_weight, Tensor)):
        return False
    if x.layout is not torch.strided or linear_weight.layout is not torch.strided:
        return False
    shape, device, dtype = x.shape, x.device, linear_weight.dtype
    if linear_weight.dim() != 2 or not shape or linear_weight.device != device:
        return False
    outputs, features = linear_weight.shape
    if shape[-1] != features or not isinstance(eps, (float, int)):
        return False
    for vector, size in ((ln_weight, features), (ln_bias, features), (linear_bias, outputs)):
        if vector is not None and not (
            isinstance(vector, Tensor) and vector.shape == (size,) and vector.device == device
        ):
            return False
    if not (x.dtype is dtype or autocast) or not (
        linear_bias is None or linear_bias.dtype is dtype
    ):
        return False
    affine = ln_weight if ln_weight is not None else ln_bias
    if affine is not None:
        if ln_bias is not None and ln_bias.dtype is not affine.dtype:
            return False
        mixed = affine.dtype is torch.float32 and x.dtype in LOW_PRECISION
        if not (affine.dtype is x.dtype or mixed):
            return False
    if not serves(x, dtype):
        if dtype.is_floating_point:
            _say_no_kernel(device.type, dtype)
        return False
    return True


def by_pytorch(
    x: Any, ln_weight: Any, ln_bias: Any, linear_weight: Any, linear_bias: Any, eps: Any
) -> Tensor:
    """Return what `F.layer_norm` and `F.linear` make of a call, or raise what they raise."""
    features = getattr(x, "shape", ())[-1:]
    others = [getattr(t, "shape", ())[-1:] for t in (ln_weight, linear_weight)]
    if features not in others:
        # An input that fits neither parameter is the one at fault, so it is held to theirs.
        features = others[1] or features
    z = F.layer_norm(x, features, ln_weight, ln_bias, eps)
    return F.linear(z, linear_weight, linear_bias)


@functools.cache
def _say_no_kernel(device_type: str, dtype: torch.dtype) -> None:
    warnings.warn(
        f"fused_norm has no kernel for {dtype} on {device_type}: PyTorch's own ops compute it",
        stacklevel=4,
    )
