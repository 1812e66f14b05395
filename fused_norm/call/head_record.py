"""The record of a chunk of rows of the head: `HeadCall` in op/head/call.mojo, field by field."""

from __future__ import annotations

import ctypes

from fused_norm.call.record import fields_of

FIELDS = (
    *("context", "M", "K", "V", "pitch", "columns", "tiles"),
    *("x", "weight", "bias", "target", "are_in_range"),
    *("samples", "sample_count", "sample_step", "offsets"),
    *("exponentials", "partials", "maxima", "sums"),
    *("is_any_bad", "scales", "logsumexp_scales"),
    *("class_weight", "class_weight_sum", "mean_weight", "mean_bias"),
    *("losses", "logsumexp", "factors", "scaled", "dx", "dx_columns", "dx_is_split"),
    *("ignore_index", "label_smoothing", "z_loss", "softcap"),
    *("tensor", "count", "is_float32", "scale"),
)
NUMBERS = ("label_smoothing", "z_loss", "softcap")


class HeadCall(ctypes.Structure):
    """A chunk of rows, or a tensor to scale: addresses, sizes and conditions.

    Fields that are not set are 0, which means absent or not wanted.
    """

    _fields_ = fields_of(FIELDS, NUMBERS)
