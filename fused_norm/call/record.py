"""The record of a call: `Call` in op/call.mojo and native/call.h, field by field."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

# The fields of the call, written for each pass.
CALL_FIELDS = (
    *("M", "eps", "context", "threads", "in_graph", "may_keep", "accumulate", "invariant"),
    *("x", "y", "mean", "rstd", "z", "dy", "dz", "dx", "dgamma", "dbeta", "dweight", "dbias"),
    *("normalization", "weight_offset", "has_statistics", "residual", "sum", "dsum"),
    *("groups", "scale", "shift", "gate", "group_pitch", "dscale", "dshift"),
    *("activation", "h", "a", "da", "dh"),
    *("parts", "part_count", "pitch", "eight_bits", "power_of_two", "one_scale"),
    "block_scales",
    *("z_scale", "y_scale", "y_one_scale", "zt", "zt_scale", "workspace", "strategy"),
    "workspace_bytes",
)
# The fields of the parameters, written once and kept.
PARAMETER_FIELDS = (
    *("K", "N", "gamma", "beta", "weight", "bias", "up", "up_bias", "norm_is_float32", "narrow"),
    *("weight_scale", "up_scale", "fold_weight", "fold_sums", "fold_constants"),
)

# The address of a result that is wanted but not yet allocated.
WANTED = 1

# The number of "no norm", in products of a CPU.
NO_NORM = 2

# The strategies of op/norm_linear/plan.mojo.
DECLINED, FUSED, KEPT_FOLD, NEW_FOLD, AROUND_PRODUCTS = range(5)

# Limits of the kernels: 32 bits for the elements of a row, 16 bits for a group's index in a grid.
LONGEST_ROW, MOST_GROUPS = 2147483647, 65535
# Most Linear layers whose products one launch computes.
MOST_PARTS = 3
# Most matrices that one launch quantizes.
MOST_MATRICES = 8
# On a CPU, a thread keeps a workspace of up to this many bytes for its next calls.
MOST_KEPT = 33554432


def fields_of(names: Sequence[str], numbers: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a record, all of eight bytes.

    Args:
        names: The names in order.
        numbers: The floating-point fields among them; the others are integers and addresses.
    """
    return tuple((name, ctypes.c_double if name in numbers else ctypes.c_int64) for name in names)


class Call(ctypes.Structure):
    """A forward or a backward, for the native extensions: addresses, sizes and conditions.

    Fields that are not set are 0, which means absent or not wanted.
    """

    _fields_ = fields_of((*CALL_FIELDS, *PARAMETER_FIELDS), ("eps", "weight_offset", "y_one_scale"))


class RowCall(ctypes.Structure):
    """A call of a row op: `RowCall` in op/rows/op.mojo and chain/call.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("M", "K", "context", "threads", "accumulate")),
        *((n, ctypes.c_int64) for n in ("parameter", "parameter_is_float32")),
        *((n, ctypes.c_int64) for n in ("parameter_gradient", "workspace")),
        *(("outputs", ctypes.c_int64 * 2), ("inputs", ctypes.c_int64 * 3)),
    )


class Part(ctypes.Structure):
    """One of several Linear layers on the same rows: `Part` in op/call.mojo and native/call.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("N", "weight", "bias", "y", "dy", "scale"))


class Matrix(ctypes.Structure):
    """One of several matrices of a pass: `Matrix` in op/passes/matrices.mojo and native/call.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("M", "K", "x", "maxima", "z", "z_scale", "zt", "zt_scale", "pitch"),
            *("whole", "skipped"),
        )
    )
