"""Applies autocast to the operands of products, as PyTorch does to those of `F.linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm.call.memory import LOW_PRECISION
from fused_norm.composition import NAMES, Operands

# Like PyTorch, which leaves float64 and dtypes that are not floating point.
_CASTABLE = LOW_PRECISION | {torch.float32}


def dtype_of_products(x: Any) -> torch.dtype | None:
    """Return the dtype that autocast uses for products on a tensor's device, None without autocast.

    Args:
        x: Should be a tensor.
    """
    if not torch._C._is_any_autocast_enabled() or not isinstance(x, Tensor):
        return None
    kind = x.device.type
    # PyTorch raises an error for tensors without values.
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast(dtype: torch.dtype, *values: Any) -> list[Any]:
    """Return values in a dtype, if autocast casts them.

    Args:
        dtype: The dtype of products.
        values: Tensors, or whatever else a user passed.
    """
    return [v.to(dtype) if isinstance(v, Tensor) and v.dtype in _CASTABLE else v for v in values]


def cast_call(t: Operands, dtype: torch.dtype) -> Operands:
    """Return a call with its Linear layers in a dtype, and all that is as wide as x in one dtype.

    Args:
        t: The tensors.
        dtype: The dtype of products.
    """
    x = t.x
    for other in (getattr(t, name) for name in NAMES["rows"]):
        if other is not None and other.dtype is not x.dtype:
            x = x.to(torch.promote_types(x.dtype, other.dtype))
    like_x: dict[str, Any] = {
        name: v if (v := getattr(t, name)) is None else v.to(x.dtype)
        for name in (*NAMES["rows"], *NAMES["groups"])
    }
    out_weight, out_bias = cast(dtype, t.out_weight, t.out_bias)
    weights, biases = cast(dtype, *t.weights), cast(dtype, *t.biases)
    last = {"out_weight": out_weight, "out_bias": out_bias}
    return t._replace(x=x, **like_x, **last, weights=weights, biases=biases)
