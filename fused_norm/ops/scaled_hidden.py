"""Activated products that stay in FP8: the ops of an MLP's hidden rows.

On Hopper in bfloat16, with scales of blocks or with one scale that is known beforehand, a product
(chain/eight_bits_ops.h) writes only 8-bit rows; elsewhere a quantization follows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.call import frozen
from fused_norm.ops.eight_bits import quantize, scales_of
from fused_norm.ops.flops import count_flops
from fused_norm.ops.hidden_scale import hidden_scale
from fused_norm.ops.registration import define, unseen
from fused_norm.ops.scaled import fake_linear, linear, linear_flops, of_frozen
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
    """
    by = (weight, weight_scale, up, up_scale, weight_scaling, power_of_two)
    weights, biases = [weight], [bias]
    if up is not None:
        weights, biases = [weight, up], [bias, up_bias]
    made, made_scale, up, up_scale, are_kept = of_frozen(*by)
    one_scale = 0.0
    if has_bound and weight_scale is None and made_scale is not None:
        by_parameters = (gamma, beta, weights, biases, activation, weight_offset)
        one_scale = hidden_scale(q.shape[0], *by_parameters, weight_scaling, power_of_two)
    operands = (q, scale, made, made_scale, scaling, weight_scaling, power_of_two)
    last = (bias, activation, dtype, up, up_scale, up_bias, are_kept)
    norm = (gamma, beta, has_bound, weight_offset, one_scale)
    found: list[Tensor] = _hidden_op(*operands, *last, *norm)
    return found


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


_hidden_op = define(
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
