"""Calls of the ops of op/max: what replaces absent operands, and the types of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, TensorType, ops

from fused_norm.activations import is_gate
from fused_norm.graphs.records import Norm, Value
from fused_norm.norms import NORMS


def call(
    name: str,
    like: Value,
    tensors: Sequence[Value],
    numbers: Sequence[float],
    results: Sequence[TensorType],
    norm: Norm,
    parameters: Sequence[str] = ("normalization", "activation"),
) -> list[Value]:
    """Add an op to the graph and return its results.

    Args:
        name: The op, without its prefix.
        like: A tensor on the device to run on.
        tensors: Its operands.
        numbers: Its scalar operands.
        results: The types of its results.
        norm: Has the parameters that the op is compiled for.
        parameters: The fields of the norm that are among these.
    """
    cpu = DeviceRef.CPU()
    chosen = {"normalization": norm.normalization, "activation": norm.activation or "none"}
    found = ops.custom(
        f"fused_norm_{name}",
        like.device,
        [*tensors, *(ops.constant(number, DType.float64, cpu) for number in numbers)],
        results,
        parameters={p: chosen[p] for p in parameters} or None,
    )
    return [value.tensor for value in found]


def of_norm(norm: Norm, x: Value) -> list[Value]:
    """Return gamma, beta, the scale and the shift of a norm over x."""
    affine = next((v for v in (norm.weight, norm.bias) if v is not None), x)
    modulation = optional([norm.scale, norm.shift], x, rank=2)
    return [*optional([norm.weight, norm.bias], x, affine.dtype), *modulation]


def optional(
    values: Sequence[Value], like: Value, dtype: DType | None = None, rank: int = 1
) -> list[Value]:
    """Return values, with empty tensors for None."""
    zero = ops.constant(0, dtype or like.dtype, like.device)
    return [ops.broadcast_to(zero, [0] * rank) if v is None else v for v in values]


def has_mean(norm: Norm) -> bool:
    """Return whether the statistics of a norm are mean and rstd, not rstd alone."""
    return NORMS[norm.normalization].has_mean


def statistics_of(norm: Norm, x: Value, rows: Any) -> list[TensorType]:
    """Return the types of the mean and the rstd of this many rows."""
    mean = rows if has_mean(norm) else 0
    return [type_of(x, mean, dtype=wide(x)), type_of(x, rows, dtype=wide(x))]


def outputs_of(norm: Norm, weight: Value) -> Any:
    """Return the columns of the result: for a gate, half of the rows of the weight."""
    columns = weight.shape[0]
    return columns // 2 if is_gate(norm.activation or "") else columns


def wide(x: Value) -> DType:
    """Return the dtype of statistics."""
    return DType.float64 if x.dtype == DType.float64 else DType.float32


def type_of(like: Value, *shape: Any, dtype: DType | None = None) -> TensorType:
    """Return the type of a tensor on the same device, of the same dtype unless one is given."""
    return TensorType(dtype or like.dtype, shape, like.device)
