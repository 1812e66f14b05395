"""Arguments and results of the functions on a MAX graph."""

from __future__ import annotations

from typing import Any, NamedTuple

# A graph's tensor: MAX has no types that mypy could read.
Value = Any


class Norm(NamedTuple):
    """A norm, and what comes before and after it.

    Attributes:
        normalization: `"layer_norm"` or `"rms_norm"`.
        weight: Gamma, shape `[K]`, in the dtype of x, or float32 with bfloat16 and float16.
        bias: Beta, shape `[K]`, in the dtype of gamma.
        eps: Added to the variance, or to the mean square.
        weight_offset: Added to gamma.
        scale: AdaLN's scale, shape `[groups, K]`, for groups of consecutive rows.
        shift: AdaLN's shift, of the same shape.
        activation: One of those of `fused_norm.norm_linear`, or None.
    """

    normalization: str = "layer_norm"
    weight: Value = None
    bias: Value = None
    eps: float = 1e-5
    weight_offset: float = 0.0
    scale: Value = None
    shift: Value = None
    activation: str | None = None


class Saved(NamedTuple):
    """What a forward saves for a backward, None for absent tensors.

    Attributes:
        sum: x + residual, shape `[M, K]`.
        mean: One for each row, shape `[M]`; None for RMSNorm.
        rstd: Reciprocal deviation of each row, or 1 / root mean square.
        product: The input of the activation, shape `[M, N]`, before a gate `[M, 2N]`.
    """

    sum: Value
    mean: Value
    rstd: Value
    product: Value


class Gradients(NamedTuple):
    """The gradients of a call's tensors, None for absent ones.

    The gradient of x is also the residual's; what is added at the end has the result's.
    """

    x: Value
    norm_weight: Value
    norm_bias: Value
    scale: Value
    shift: Value
    weight: Value
    bias: Value
    out_weight: Value = None
    out_bias: Value = None
