"""The op family in MAX graphs: from a graph's values to values, around the ops of op/max.

A graph loads those from the folder `sources()`. Its tensors are matrices of M rows; what is None is
not there. Dimensions may be symbolic, so that a graph compiles once for all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from max.dtype import DType
from max.graph import DeviceRef, TensorType, ops

from fused_norm.composition import is_gate
from fused_norm.native.build import source_root

# A graph's tensor: MAX brings no types that a checker could read.
Value = Any


class Norm(NamedTuple):
    """A norm, what comes before it and what it is followed by.

    Attributes:
        normalization: `"layer_norm"` or `"rms_norm"`.
        weight: Gamma, shape `[K]`, in the dtype of x, or float32 beside bfloat16 and float16.
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


def sources() -> Path:
    """Return the folder of ops for `Graph(custom_extensions=[sources()])`."""
    return source_root() / "op"


def norm_linear(
    x: Value,
    norm: Norm,
    weight: Value,
    bias: Value = None,
    *,
    residual: Value = None,
    statistics: tuple[Value, Value] | None = None,
) -> tuple[Value, Saved]:
    """Apply a norm, a Linear layer and an activation, as `fused_norm.norm_linear` does.

    Args:
        x: Shape `[M, K]`.
        norm: The norm, and what surrounds it.
        weight: Shape `[N, K]`, before a gate `[2N, K]`, the gate first; several on one norm are
            one, below one another.
        bias: Of as many elements as the weight has rows, or None.
        residual: Added to x, shape `[M, K]`, or None.
        statistics: The mean and factor of the rows of x, as `linear_add` leaves them, or None.

    Returns:
        y of shape `[M, N]`, and what a backward takes.
    """
    rows, columns = x.shape[0], weight.shape[0]
    y = _type(x, rows, _outputs(norm, weight))
    product = _type(x, rows, columns if norm.activation else 0)
    if statistics is not None:
        found = _call(
            "norm_linear_known",
            x,
            [
                *(x, *_of_norm(norm, x), *_optional(statistics, x, _wide(x))),
                *(weight, *_optional([bias], x)),
            ],
            [norm.weight_offset],
            [y, product],
            norm,
        )
        return found[0], Saved(None, *statistics, found[1] if norm.activation else None)
    total = x.type if residual is None else residual.type
    y, total, mean, rstd, product = _call(
        "norm_linear",
        x,
        [x, *_optional([residual], x, rank=2), *_of_norm(norm, x), weight, *_optional([bias], x)],
        [norm.eps, norm.weight_offset],
        [
            y,
            _type(x, 0, 0) if residual is None else total,
            *_statistics(norm, x, rows),
            product,
        ],
        norm,
    )
    return y, Saved(
        None if residual is None else total,
        None if norm.normalization == "rms_norm" else mean,
        rstd,
        product if norm.activation else None,
    )


def norm_linear_backward(
    grad_output: Value,
    x: Value,
    norm: Norm,
    weight: Value,
    bias: Value,
    saved: Saved,
    *,
    grad_sum: Value = None,
) -> Gradients:
    """Return the gradients of `norm_linear`.

    Args:
        grad_output: That of y.
        x: As in `norm_linear`, like the arguments after it.
        norm: The norm.
        weight: The weight.
        bias: The bias.
        saved: What the forward left.
        grad_sum: The gradient that reaches `saved.sum` besides, or None.
    """
    return _backward(grad_output, x, norm, weight, bias, saved, grad_sum, False)[0]


def norm_mlp(
    x: Value,
    norm: Norm,
    weight: Value,
    bias: Value,
    out_weight: Value,
    out_bias: Value = None,
    *,
    residual: Value = None,
    residual_out: Value = None,
) -> tuple[Value, Saved]:
    """Apply a norm, a Linear layer, an activation and a second Linear layer.

    Args:
        x: Shape `[M, K]`.
        norm: The norm, and the activation.
        weight: As in `norm_linear`.
        bias: As in `norm_linear`.
        out_weight: Shape `[K2, N]`.
        out_bias: Shape `[K2]`, or None.
        residual: Added to x, shape `[M, K]`, or None.
        residual_out: Added to the result, shape `[M, K2]`, or None.

    Returns:
        A matrix of shape `[M, K2]`, and what a backward takes.

    Raises:
        ValueError: Without an activation.
    """
    if norm.activation is None:
        raise ValueError("an MLP needs an activation")
    a, saved = norm_linear(x, norm, weight, bias, residual=residual)
    return _linear_add(a, out_weight, out_bias, residual_out, norm, False)[0], saved


def norm_mlp_backward(
    grad_output: Value,
    x: Value,
    norm: Norm,
    weight: Value,
    bias: Value,
    out_weight: Value,
    out_bias: Value,
    saved: Saved,
    *,
    grad_sum: Value = None,
) -> Gradients:
    """Return the gradients of `norm_mlp`.

    Args:
        grad_output: That of the result.
        x: As in `norm_mlp`, like the arguments after it.
        norm: The norm.
        weight: The first weight.
        bias: The first bias.
        out_weight: The second weight.
        out_bias: The second bias.
        saved: What the forward left.
        grad_sum: The gradient that reaches `saved.sum` besides, or None.
    """
    rows, outputs = grad_output.shape[0], _outputs(norm, weight)
    da, *_ = _linear_backward(
        grad_output, None, out_weight, [_type(x, rows, outputs), _type(x, 0, 0), _type(x, 0)]
    )
    first, a = _backward(da, x, norm, weight, bias, saved, grad_sum, True)
    _, *second = _linear_backward(
        grad_output,
        a,
        out_weight,
        [_type(x, 0, 0), out_weight.type, _type(x, 0) if out_bias is None else out_bias.type],
    )
    return first._replace(out_weight=second[0], out_bias=None if out_bias is None else second[1])


def linear_add(
    x: Value, weight: Value, bias: Value, residual: Value, norm: Norm
) -> tuple[Value, tuple[Value, Value]]:
    """Apply a Linear layer, add a residual, and find the statistics for the norm that follows.

    Args:
        x: Shape `[M, K]`.
        weight: Shape `[N, K]`.
        bias: Shape `[N]`, or None.
        residual: Shape `[M, N]`.
        norm: The norm that follows.

    Returns:
        The sum, shape `[M, N]`, and the mean (None for RMSNorm) and factor of its rows.
    """
    total, mean, rstd = _linear_add(x, weight, bias, residual, norm, True)
    return total, (None if norm.normalization == "rms_norm" else mean, rstd)


def linear_add_backward(
    grad_output: Value, x: Value, weight: Value, bias: Value
) -> tuple[Value, Value, Value]:
    """Return the gradients of x, the weight and the bias; the residual's is that of the sum.

    Args:
        grad_output: That of the sum.
        x: As in `linear_add`, like the arguments after it.
        weight: The weight.
        bias: The bias, or None.
    """
    dbias = _type(x, 0) if bias is None else bias.type
    dx, dweight, dbias = _linear_backward(grad_output, x, weight, [x.type, weight.type, dbias])
    return dx, dweight, None if bias is None else dbias


def _backward(
    grad_output: Value,
    x: Value,
    norm: Norm,
    weight: Value,
    bias: Value,
    saved: Saved,
    grad_sum: Value,
    wants_activated: bool,
) -> tuple[Gradients, Value]:
    rows = grad_output.shape[0]
    parameters = [*_of_norm(norm, x), weight, *_optional([bias], x)]
    *found, activated = _call(
        "norm_linear_backward",
        x,
        [
            grad_output,
            *_optional([grad_sum], x, rank=2),
            x if saved.sum is None else saved.sum,
            *parameters[:4],
            *_optional([saved.mean, saved.rstd], x, _wide(x)),
            weight,
            *_optional([saved.product], x, rank=2),
        ],
        [norm.weight_offset],
        [
            x.type,
            *(parameter.type for parameter in parameters),
            _type(x, rows, _outputs(norm, weight)) if wants_activated else _type(x, 0, 0),
        ],
        norm,
    )
    there = (x, norm.weight, norm.bias, norm.scale, norm.shift, weight, bias)
    given = [None if v is None else g for v, g in zip(there, found, strict=True)]
    return Gradients(*given), activated


def _linear_add(
    x: Value, weight: Value, bias: Value, residual: Value, norm: Norm, has_statistics: bool
) -> list[Value]:
    rows = x.shape[0]
    return _call(
        "linear_add",
        x,
        [x, weight, *_optional([bias], x), *_optional([residual], x, rank=2)],
        [norm.eps],
        [
            _type(x, rows, weight.shape[0]),
            *(_statistics(norm, x, rows) if has_statistics else [_type(x, 0, dtype=_wide(x))] * 2),
        ],
        norm,
        ["normalization"],
    )


def _linear_backward(
    grad_output: Value, x: Value, weight: Value, results: Sequence[TensorType]
) -> list[Value]:
    given = _optional([x], weight, rank=2)
    return _call(
        "linear_add_backward", weight, [grad_output, *given, weight], [], results, Norm(), []
    )


def _call(
    name: str,
    like: Value,
    tensors: Sequence[Value],
    numbers: Sequence[float],
    results: Sequence[TensorType],
    norm: Norm,
    parameters: Sequence[str] = ("normalization", "activation"),
) -> list[Value]:
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


def _of_norm(norm: Norm, x: Value) -> list[Value]:
    affine = next((v for v in (norm.weight, norm.bias) if v is not None), x)
    modulation = _optional([norm.scale, norm.shift], x, rank=2)
    return [*_optional([norm.weight, norm.bias], x, affine.dtype), *modulation]


def _optional(
    values: Sequence[Value], like: Value, dtype: DType | None = None, rank: int = 1
) -> list[Value]:
    """Return values, those that are None as tensors without elements."""
    zero = ops.constant(0, dtype or like.dtype, like.device)
    return [ops.broadcast_to(zero, [0] * rank) if v is None else v for v in values]


def _statistics(norm: Norm, x: Value, rows: Any) -> list[TensorType]:
    mean = 0 if norm.normalization == "rms_norm" else rows
    return [_type(x, mean, dtype=_wide(x)), _type(x, rows, dtype=_wide(x))]


def _outputs(norm: Norm, weight: Value) -> Any:
    columns = weight.shape[0]
    return columns // 2 if is_gate(norm.activation or "") else columns


def _wide(x: Value) -> DType:
    return DType.float64 if x.dtype == DType.float64 else DType.float32


def _type(like: Value, *shape: Any, dtype: DType | None = None) -> TensorType:
    return TensorType(dtype or like.dtype, shape, like.device)
