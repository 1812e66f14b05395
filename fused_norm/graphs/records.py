"""What the functions on a MAX graph take and return."""

from __future__ import annotations

from typing import Any, NamedTuple

# A graph's tensor: MAX brings no types that a checker could read.
Value = Any


class Norm(NamedTuple):
    """A norm, what comes before it and what it is followed by.

    Attributes:
        normalization: `"layer_norm"` or `"rms_norm"`.
        weight: Gamma, shape `[K]`, in the dtype of x, or float32 with bfloat16 and float16.
        bias: Beta, shape `[K]`, in the dtype of gamma.
        eps: Added to the variance, or to the mean square.
        weight_offset: Added to gamma.
        scale: Of AdaLN, shape `[groups, K]`, for groups of neighboring rows.
        shift: Of AdaLN, likewise.
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
    """What a forward leaves besides its result, None for what is not there.

    Attributes:
        sum: x + residual, shape `[M, K]`.
        mean: Of each row, shape `[M]`; None for RMSNorm.
        rstd: Reciprocal deviation of each row, or 1 / root mean square.
        product: What the activation is taken of, shape `[M, N]`, before a gate `[M, 2N]`.
    """

    sum: Value
    mean: Value
    rstd: Value
    product: Value


class Gradients(NamedTuple):
    """The gradients of a call's tensors, None for those that are not there.

    That of x is the residual's as well; that of what is added at the end is the result's own.
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
