"""Activated products that stay in FP8: the ops of an MLP's hidden rows.

On Hopper in bfloat16, with scales of blocks or with one scale that is known beforehand, a product
(chain/eight_bits_ops.h) writes only 8-bit rows; elsewhere a quantization follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.call import frozen
from fused_norm.ops.eight_bits import quantize, scales_of
from fused_norm.ops.flops import count_flops
from fused_norm.ops.hidden_columns import folded
from fused_norm.ops.hidden_scale import Kept, Parameters, hidden_scale, kept_parameters
from fused_norm.ops.registration import define, define_in_python, is_compiling, unseen
from fused_norm.ops.scaled import fake_linear, linear, linear_flops, linear_op, of_frozen
from fused_norm.recipes import E4M3, Cast


def hidden(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    scaling: str,
    weight_scaling: str,
    power_of_two: bool,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    up: Tensor | None = None,
    up_scale: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    has_bound: bool = False,
    weight_offset: float = 0.0,
    kept: Kept | None = None,
) -> list[Tensor]:
    """Return the result of `linear` with an activation, in 8 bits `[M, N]`, and its scales.

    With scales of blocks, or with one scale that a bound gives for all rows, a kernel may write no
    more. It activates in float32 and rounds to `dtype` before it quantizes, just like the separate
    pass elsewhere, which reads the result of `linear`.

    Args:
        q: As in `linear`.
        scale: As in `linear`.
        weight: As in `linear`.
        weight_scale: As in `linear`.
        scaling: Which elements of rows, and of the results, share a scale.
        weight_scaling: As in `linear`.
        power_of_two: Whether scales are rounded up to powers of two, including the results'.
        bias: As in `linear`.
        activation: One of ACTIVATIONS.
        dtype: The dtype to which results are rounded first.
        up: As in `linear`.
        up_scale: As in `linear`.
        up_bias: As in `linear`.
        gamma: Weight of the norm that computed the rows, `[K]`, or None.
        beta: Its bias `[K]`, or None.
        has_bound: Whether `hidden_scale` may give results one scale: only for normalized rows.
        weight_offset: Added to gamma.
        kept: What is kept of these parameters, if the caller knows.
    """
    how = (weight_scaling, power_of_two)
    by = (weight, weight_scale, up, up_scale, *how)
    weights, biases = [weight], [bias]
    if up is not None:
        weights, biases = [weight, up], [bias, up_bias]
    made, made_scale, up, up_scale, are_kept = of_frozen(*by) if kept is None else kept.weights()
    one_scale = 0.0
    if has_bound and weight_scale is None and made_scale is not None:
        of = Parameters(gamma, beta, weights, biases, activation, weight_offset, *how)
        one_scale = hidden_scale(q.shape[0], of, kept)
    operands = (q, scale, made, made_scale, scaling, *how)
    last = (bias, activation, dtype, up, up_scale, up_bias, are_kept)
    norm = (gamma, beta, has_bound, weight_offset, one_scale)
    found: list[Tensor] = hidden_op(*operands, *last, *norm)
    return found


def gated_mlp(
    q: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scaling: str,
    weight_scaling: str,
    power_of_two: bool,
    activation: str,
    dtype: torch.dtype,
    out_weight: Tensor,
    out_bias: Tensor | None,
    residual: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight_offset: float,
) -> Tensor:
    """Return the result of a gate of normalized rows and of a second layer, `[M, K2]`.

    It is that of `hidden` and `linear`, unless frozen parameters give hidden columns factors, which
    both layers have to know of.

    Args:
        q: As in `linear`.
        scale: As in `linear`.
        weights: The first layer's, `[2N, K]`, or two of `[N, K]`, none in 8 bits.
        biases: For each weight its bias, or None.
        scaling: As in `hidden`.
        weight_scaling: As in `hidden`.
        power_of_two: As in `hidden`.
        activation: The gate.
        dtype: The dtype of the result, and to which hidden rows are rounded first.
        out_weight: The second layer's weight `[K2, N]`, not in 8 bits.
        out_bias: Its bias `[K2]`, or None.
        residual: What is added to the result, `[M, K2]`, or None.
        gamma: As in `hidden`.
        beta: As in `hidden`.
        weight_offset: As in `hidden`.
    """
    operands = (q, scale, [*weights], [*biases], scaling, weight_scaling, power_of_two)
    last: Any = (activation, dtype, out_weight, out_bias, residual, gamma, beta, weight_offset)
    # What is frozen when a graph runs is not known when it is compiled.
    run: Any = _gated_mlp_op if is_compiling() else _gated_mlp
    y: Tensor = run(*operands, *last)
    return y


def _gated_mlp(
    q: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *rest: Any,
) -> Tensor:
    *how, activation, dtype, out_weight, out_bias, residual, gamma, beta, weight_offset = rest
    norm = (gamma, beta, True, weight_offset)
    of = Parameters(gamma, beta, weights, biases, activation, weight_offset, *how[1:])
    kept = kept_parameters(of, out_weight) if frozen.is_any() else None
    made = None if kept is None else folded(len(q), of, out_weight, kept)
    layers: list[Any] = [(w, None, b) for w, b in zip(weights, biases, strict=True)]
    if made is not None:
        layers = [*made.layers]
    (weight, own, bias), up = layers[0], layers[1] if len(layers) > 1 else (None, None, None)
    operands = (q, scale, weight, own, *how, bias, activation, dtype, *up)
    last: Any = (out_bias, residual, "", dtype)
    if made is None:
        gamma_and_beta: Any = {"gamma": gamma, "beta": beta, "weight_offset": weight_offset}
        if kept is not None:
            kept = kept._replace(keys=kept.keys[:-1])
        rows = hidden(*operands, **gamma_and_beta, has_bound=True, kept=kept)
        return linear(rows[0], rows[1], out_weight, None, *how, *last)
    rows = hidden_op(*operands, made.are_kept, *norm, made.one_scale)
    by = (made.q, made.scale, *how, *last, None, None, None, made.is_kept)
    y: Tensor = linear_op(rows[0], rows[1], *by)
    return y


def _fake_gated_mlp(q: Tensor, *rest: Any) -> Tensor:
    dtype, out_weight = rest[7:9]
    return q.new_empty((q.shape[0], len(out_weight)), dtype=dtype)


def _hidden(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor | None, *rest: Any
) -> list[Tensor]:
    *by, _, gamma, beta, has_bound, weight_offset, one_scale = rest
    if frozen.is_any() and weight_scale is None:
        norm: Any = {"gamma": gamma, "beta": beta, "weight_offset": weight_offset}
        return hidden(q, scale, weight, weight_scale, *by, has_bound=has_bound, **norm)
    scaling, weight_scaling, power_of_two, bias, *last = by
    how = (scaling, weight_scaling, power_of_two)
    y = linear(q, scale, weight, weight_scale, *how, bias, None, *last)
    cast = Cast(E4M3, scaling)
    if one_scale:
        return [*recipes.quantize_within(y, cast, one_scale)]
    return quantize(y, cast, power_of_two)


def _fake_hidden(q: Tensor, scale: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    y = fake_linear(q, scale, weight, *rest[:5], None, *rest[5:])
    scales = q.new_empty(scales_of(y.shape, rest[1]), dtype=torch.float32)
    return [y.to(E4M3), scales]


hidden_op = define(
    "fp8_hidden(Tensor q, Tensor scale, Tensor weight, Tensor? weight_scale, str scaling, "
    "str weight_scaling, bool power_of_two, Tensor? bias, str activation, ScalarType dtype, "
    "Tensor? up, Tensor? up_scale, Tensor? up_bias, bool are_kept, Tensor? gamma, Tensor? beta, "
    "bool has_bound, float weight_offset, float one_scale) -> Tensor[]",
    _fake_hidden,
    unseen(_hidden),
)


count_flops(
    "fp8_hidden", lambda q, scale, weight, *rest: linear_flops(q, scale, weight, *rest[:-5])
)
_gated_mlp_op = define_in_python(
    "fp8_gated_mlp(Tensor q, Tensor scale, Tensor[] weights, Tensor?[] biases, str scaling, "
    "str weight_scaling, bool power_of_two, str activation, ScalarType dtype, Tensor out_weight, "
    "Tensor? out_bias, Tensor? residual, Tensor? gamma, Tensor? beta, float weight_offset) "
    "-> Tensor",
    _gated_mlp,
    _fake_gated_mlp,
)
count_flops(
    "fp8_gated_mlp",
    lambda q, scale, weights, *rest: (
        2 * q.numel() * sum(map(len, weights)) + 2 * len(q) * rest[6].numel()
    ),
)
