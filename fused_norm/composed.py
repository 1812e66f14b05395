"""LayerNorm composed of three ops: `div(v, norm(v))` of `v = mean(x)`.

Each op has its own forward and backward kernel, and each reads and writes whole tensors. The fused
`trainable_eps_layer_norm` is measured against it. The names are the Spiral language's.
"""

from __future__ import annotations

from torch import Tensor

from fused_norm import reference
from fused_norm.ops import rows
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
    return rows.mean(x)


def norm(v: Tensor) -> Tensor:
    """Return the root mean square of each row, once for each of its elements.

    Args:
        v: Input of shape `[..., K]`.

    Returns:
        `sqrt(mean(v * v))`, of the shape and dtype of `v`.
    """
    if not has_row_kernel(v):
        return by_pytorch_widened(reference.norm, v)
    return rows.norm(v)


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
    return rows.div(a, b)


def layer_norm(x: Tensor) -> Tensor:
    """Apply layer normalization over the last dimension, without an eps.

    Args:
        x: Input of shape `[..., K]`.

    Returns:
        Tensor of the shape and dtype of `x`, with NaN in constant rows.
    """
    v = mean(x)
    return div(v, norm(v))
