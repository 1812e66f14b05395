"""The record of a chunk of rows of the head: `HeadCall` in op/head/call.mojo, field by field."""

from __future__ import annotations

import ctypes

FIELDS = (
    *("context", "M", "K", "V", "pitch", "columns", "tiles"),
    *("x", "weight", "bias", "target", "offsets", "exponentials", "partials", "maxima", "sums"),
    *("is_any_bad", "scales", "logsumexp_scales"),
    *("class_weight", "class_weight_sum", "mean_weight", "mean_bias"),
    *("losses", "logsumexp", "factors", "scaled", "ignore_index", "label_smoothing", "z_loss"),
    *("tensor", "count", "is_float32", "scale"),
)
NUMBERS = ("label_smoothing", "z_loss")


class HeadCall(ctypes.Structure):
    """A chunk of rows, or a tensor to scale: addresses, sizes and conditions.

    Fields left alone are 0, which stands for what is not there or not wanted.
    """

    _fields_ = tuple(
        (name, ctypes.c_double if name in NUMBERS else ctypes.c_int64) for name in FIELDS
    )
