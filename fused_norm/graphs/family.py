"""The functions of the op family, forward and backward, on the values of a MAX graph."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph import TensorType

from fused_norm.graphs.calls import (
    call,
    has_mean,
    of_norm,
    optional,
    outputs_of,
    statistics_of,
    type_of,
    wide,
)
from fused_norm.graphs.records import Gradients, Norm, Saved, Value


def norm_linear(
    x: Value,
    norm: Norm,
    weight: Value,
    bias: Value = None,
    *,
    residual: Value = None,
    statistics: tuple[Value, Value] | None = None,
) -> tuple[Value, Saved]:
    """Apply a norm, a Linear layer and an activation, like `fused_norm.norm_linear`.

    Args:
        x: Shape `[M, K]`.
        norm: The norm, and what surrounds it.
        weight: Shape `[N, K]`, before a gate `[2N, K]`, the gate first; several weights on one norm
            are concatenated by rows.
        bias: One element for each row of the weight, or None.
        residual: Added to x, shape `[M, K]`, or None.
        statistics: The mean and rstd of the rows of x, as from `linear_add`, or None.

    Returns:
        y of shape `[M, N]`, and what a backward needs.
    """
    rows, columns = x.shape[0], weight.shape[0]
    y = type_of(x, rows, outputs_of(norm, weight))
    product = type_of(x, rows, columns if norm.activation else 0)
    if statistics is not None:
        found = call(
            "norm_linear_known",
            x,
            [
                *(x, *of_norm(norm, x), *optional(statistics, x, wide(x))),
                *(weight, *optional([bias], x)),
            ],
            [norm.weight_offset],
            [y, product],
            norm,
        )
        return found[0], Saved(None, *statistics, found[1] if norm.activation else None)
    total = x.type if residual is None else residual.type
    y, total, mean, rstd, product = call(
        "norm_linear",
        x,
        [x, *optional([residual], x, rank=2), *of_norm(norm, x), weight, *optional([bias], x)],
        [norm.eps, norm.weight_offset],
        [
            y,
            type_of(x, 0, 0) if residual is None else total,
            *statistics_of(norm, x, rows),
            product,
        ],
        norm,
    )
    return y, Saved(
        None if residual is None else total,
        mean if has_mean(norm) else None,
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
        grad_output: The gradient of y.
        x: As in `norm_linear`, like the arguments after it.
        norm: The norm.
        weight: The weight.
        bias: The bias.
        saved: What the forward saved.
        grad_sum: The gradient that reaches `saved.sum` as well, or None.
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
        A matrix of shape `[M, K2]`, and what a backward needs.

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
        grad_output: The gradient of the result.
        x: As in `norm_mlp`, like the arguments after it.
        norm: The norm.
        weight: The first weight.
        bias: The first bias.
        out_weight: The second weight.
        out_bias: The second bias.
        saved: What the forward saved.
        grad_sum: The gradient that reaches `saved.sum` as well, or None.
    """
    rows, outputs = grad_output.shape[0], outputs_of(norm, weight)
    da, *_ = _linear_backward(
        grad_output, None, out_weight, [type_of(x, rows, outputs), type_of(x, 0, 0), type_of(x, 0)]
    )
    first, a = _backward(da, x, norm, weight, bias, saved, grad_sum, True)
    _, *second = _linear_backward(
        grad_output,
        a,
        out_weight,
        [type_of(x, 0, 0), out_weight.type, type_of(x, 0) if out_bias is None else out_bias.type],
    )
    return first._replace(out_weight=second[0], out_bias=None if out_bias is None else second[1])


def linear_add(
    x: Value, weight: Value, bias: Value, residual: Value, norm: Norm
) -> tuple[Value, tuple[Value, Value]]:
    """Apply a Linear layer, add a residual, and compute the statistics for the norm that follows.

    Args:
        x: Shape `[M, K]`.
        weight: Shape `[N, K]`.
        bias: Shape `[N]`, or None.
        residual: Shape `[M, N]`.
        norm: The norm that follows.

    Returns:
        The sum, shape `[M, N]`, and the mean (None for RMSNorm) and rstd of its rows.
    """
    total, mean, rstd = _linear_add(x, weight, bias, residual, norm, True)
    return total, (mean if has_mean(norm) else None, rstd)


def linear_add_backward(
    grad_output: Value, x: Value, weight: Value, bias: Value
) -> tuple[Value, Value, Value]:
    """Return the gradients of x, the weight and the bias; the residual's is that of the sum.

    Args:
        grad_output: The gradient of the sum.
        x: As in `linear_add`, like the arguments after it.
        weight: The weight.
        bias: The bias, or None.
    """
    dbias = type_of(x, 0) if bias is None else bias.type
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
    parameters = [*of_norm(norm, x), weight, *optional([bias], x)]
    *found, activated = call(
        "norm_linear_backward",
        x,
        [
            grad_output,
            *optional([grad_sum], x, rank=2),
            x if saved.sum is None else saved.sum,
            *parameters[:4],
            *optional([saved.mean, saved.rstd], x, wide(x)),
            weight,
            *optional([saved.product], x, rank=2),
        ],
        [norm.weight_offset],
        [
            x.type,
            *(parameter.type for parameter in parameters),
            type_of(x, rows, outputs_of(norm, weight)) if wants_activated else type_of(x, 0, 0),
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
    return call(
        "linear_add",
        x,
        [x, weight, *optional([bias], x), *optional([residual], x, rank=2)],
        [norm.eps],
        [
            type_of(x, rows, weight.shape[0]),
            *(
                statistics_of(norm, x, rows)
                if has_statistics
                else [type_of(x, 0, dtype=wide(x))] * 2
            ),
        ],
        norm,
        ["normalization"],
    )


def _linear_backward(
    grad_output: Value, x: Value, weight: Value, results: Sequence[TensorType]
) -> list[Value]:
    given = optional([x], weight, rank=2)
    return call(
        "linear_add_backward", weight, [grad_output, *given, weight], [], results, Norm(), []
    )
