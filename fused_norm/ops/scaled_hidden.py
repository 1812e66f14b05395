"""Activated products that stay in FP8, as PyTorch knows them: an MLP's hidden rows.

On Hopper in bfloat16, with scales of blocks, a product (chain/eight_bits_ops.h) stores nothing
else; elsewhere a quantization follows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm.call import frozen
from fused_norm.ops.eight_bits import quantize, scales_of
from fused_norm.ops.flops import count_flops
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
) -> list[Tensor]:
    """Return what `linear` with an activation returns, in 8 bits `[M, N]`, and its scales.

    With scales of blocks, a kernel may write no more than that. It activates in float32 and rounds
    to `dtype` before it quantizes, as elsewhere the pass does that reads what `linear` wrote.

    Args:
        q: As of `linear`.
        scale: As of `linear`.
        weight: As of `linear`.
        weight_scale: As of `linear`.
        scaling: What shares a scale of rows, and of the results.
        weight_scaling: As of `linear`.
        power_of_two: Whether scales are rounded up to powers of two, those of the results too.
        bias: As of `linear`.
        activation: One of ACTIVATIONS.
        dtype: To which results are rounded first.
        up: As of `linear`.
        up_scale: As of `linear`.
        up_bias: As of `linear`.
    """
    by = (weight, weight_scale, up, up_scale, weight_scaling, power_of_two)
    weight, weight_scale, up, up_scale, are_kept = of_frozen(*by)
    operands = (q, scale, weight, weight_scale, scaling, weight_scaling, power_of_two)
    last = (bias, activation, dtype, up, up_scale, up_bias, are_kept)
    found: list[Tensor] = _hidden_op(*operands, *last)
    return found


def _hidden(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor | None, *rest: Any
) -> list[Tensor]:
    scaling, weight_scaling, power_of_two, bias, *last, _ = rest
    if frozen.is_any() and weight_scale is None:
        return hidden(q, scale, weight, weight_scale, *rest[:-1])
    how = (scaling, weight_scaling, power_of_two)
    y = linear(q, scale, weight, weight_scale, *how, bias, None, *last)
    return quantize(y, Cast(E4M3, scaling), power_of_two)


def _fake_hidden(q: Tensor, scale: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    y = fake_linear(q, scale, weight, *rest[:5], None, *rest[5:])
    scales = q.new_empty(scales_of(y.shape, rest[1]), dtype=torch.float32)
    return [y.to(E4M3), scales]


_hidden_op = define(
    "fp8_hidden(Tensor q, Tensor scale, Tensor weight, Tensor? weight_scale, str scaling, "
    "str weight_scaling, bool power_of_two, Tensor? bias, str activation, ScalarType dtype, "
    "Tensor? up, Tensor? up_scale, Tensor? up_bias, bool are_kept) -> Tensor[]",
    _fake_hidden,
    unseen(_hidden),
)


count_flops("fp8_hidden", linear_flops)
