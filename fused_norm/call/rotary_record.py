"""The record of a tensor of heads: `RotaryCall` in op/rotary/call.mojo, field by field."""

from __future__ import annotations

import ctypes

from fused_norm.call.record import fields_of

FIELDS = (
    *("context", "threads", "M", "heads", "D", "pitch", "rotary", "positions", "angles"),
    *("is_interleaved", "is_normalized", "eps", "weight_offset"),
    *("gamma_is_float32", "angles_are_float32"),
    *("x", "gamma", "cos", "sin", "y", "dy", "dx", "parts", "dgamma"),
    *("second_heads", "second_pitch", "second_x", "second_gamma", "second_y"),
    *("slots", "slot_count", "tokens", "second_sequence", "second_head", "second_slot"),
    *("third_pitch", "third_x", "third_y", "third_sequence", "third_head", "third_slot"),
    *("y_sequence", "y_head", "y_slot", "gamma_sum"),
)
NUMBERS = ("eps", "weight_offset")


class RotaryCall(ctypes.Structure):
    """Heads to normalize and rotate: addresses, sizes and conditions.

    Fields that are not set are 0, which means absent or not wanted.
    """

    _fields_ = fields_of(FIELDS, NUMBERS)
