"""LayerNorm composed of three ops: `div(v, norm(v))` of `v = mean(x)`.

Each op has its own forward and backward kernel, and each reads and writes whole tensors. The fused
`trainable_eps_layer_norm` is measured against it. The names are the Spiral language's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fused_norm import reference
from fused_norm.ops import rows
from fused_norm.ops.registration import may_follow
from fused_norm.ops.validation import by_pytorch_widened, div_by_pytorch, has_row_kernel


def mean(x: Tensor) -> Tensor:
    """Subtract the mean of each row from it.

    Args:
        x: Input of shape `[..., K]`.

    Returns:
        `x - mean(x)`, of the shape and dtype of `x`.
    """
    if not has_row_kernel(x):
        return by_pytorch_widened(reference.mean, x)
    return _call(rows.mean, rows.mean_with_gradients, x)


def norm(v: Tensor) -> Tensor:
    """Return the root mean square of each row, once for each of its elements.

    Args:
        v: Input of shape `[..., K]`.

    Returns:
        `sqrt(mean(v * v))`, of the shape and dtype of `v`.
    """
    if not has_row_kernel(v):
        return by_pytorch_widened(reference.norm, v)
    return _call(rows.norm, rows.norm_with_gradients, v)


def div(a: Tensor, b: Tensor) -> Tensor:
    """Divide element by element, without broadcasting.

    Args:
        a: The dividend.
        b: The divisor, of the shape of `a`.

    Returns:
        `a / b`.

    Raises:
        RuntimeError: If the shapes differ.
    """
    if not has_row_kernel(a, b):
        return div_by_pytorch(a, b)
    return _call(rows.div, rows.div_with_gradients, a, b)


def layer_norm(x: Tensor) -> Tensor:
    """Apply layer normalization over the last dimension, without an eps.

    Args:
        x: Input of shape `[..., K]`.

    Returns:
        Tensor of the shape and dtype of `x`, with NaN in constant rows.
    """
    v = mean(x)
    return div(v, norm(v))


def _call(op: Callable[..., Any], with_gradients: Callable[..., Any], *inputs: Tensor) -> Tensor:
    needs = may_follow() and any(t.requires_grad for t in inputs)
    y: Tensor = (with_gradients if needs else op)(*inputs)
    return y
