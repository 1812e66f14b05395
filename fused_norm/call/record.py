"""The record of a call: `Call` in op/call.mojo and native/call.h, field by field."""

from __future__ import annotations

import ctypes

# The call's half, written anew for each pass.
CALL_FIELDS = (
    *("M", "eps", "context", "threads", "in_graph", "may_keep", "accumulate"),
    *("x", "y", "mean", "rstd", "z", "dy", "dz", "dx", "dgamma", "dbeta", "dweight", "dbias"),
    *("workspace", "way", "workspace_bytes"),
)
# The parameters' half, written once and kept.
PARAMETER_FIELDS = (
    *("K", "N", "gamma", "beta", "weight", "bias", "norm_is_float32", "narrow"),
    *("fold_weight", "fold_sums", "fold_constants"),
)

# The ways of op/norm_linear/plan.mojo.
DECLINED, FUSED, KEPT_FOLD, NEW_FOLD, AROUND_PRODUCTS = range(5)


class Call(ctypes.Structure):
    """A forward or a backward, for the native extensions: addresses, sizes and conditions.

    Fields left alone are 0, which stands for what is not there or not wanted.
    """

    _fields_ = tuple(
        (name, ctypes.c_double if name == "eps" else ctypes.c_int64)
        for name in (*CALL_FIELDS, *PARAMETER_FIELDS)
    )
