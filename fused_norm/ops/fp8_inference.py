"""Calls of the op family in FP8 that need no gradient: a norm that quantizes, and its products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.activations import activated, is_gate
from fused_norm.call import frozen
from fused_norm.composition import Operands, Spec, has_sum
from fused_norm.ops import quantized, scaled
from fused_norm.ops.hidden_scale import has_bound
from fused_norm.ops.registration import is_compiling
from fused_norm.ops.scaled_hidden import gated_mlp
from fused_norm.ops.scaled_hidden import hidden as hidden_rows
from fused_norm.ops.scaled_linears import linears
from fused_norm.recipes import Recipe


def _products(
    q: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe,
    power_of_two: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the products of 8-bit rows with all weights, in one launch if that is faster."""
    how = (recipe.input.scaling, recipe.weight.scaling, power_of_two)
    numbers, scales = zip(*map(quantized.parts, weights), strict=True)
    if len(weights) == 1:
        return [scaled.linear(q, scale, numbers[0], scales[0], *how, biases[0], None, "", dtype)]
    return scaled.linears(q, scale, numbers, scales, *how, biases, dtype)


def _in_shape(y: Tensor, rows: Sequence[int]) -> Tensor:
    """Return `[M, N]` as `[*rows, N]`, not as a view: like `F.linear`'s, it may be written."""
    found: Tensor = torch.ops.aten._unsafe_view(y, [*rows, y.shape[-1]])
    return found


def inference(spec: Spec, t: Operands, recipe: Recipe, power_of_two: bool) -> list[Tensor]:
    """Compute a call with a norm that quantizes its rows, and products with fused epilogues.

    Args:
        spec: What to compute.
        t: The tensors.
        recipe: The recipe.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    x = t.x
    norm = (spec.normalization, spec.eps, spec.weight_offset, recipe.input.scaling, power_of_two)
    total, q, scale = scaled.norm(x, t.residual, t.gamma, t.beta, *norm)
    how = (recipe.input.scaling, recipe.weight.scaling, power_of_two)
    rows = x.shape[:-1]
    layers = list(zip(map(quantized.parts, t.weights), t.biases, strict=True))
    is_one = not spec.is_joined or len(layers) == 1
    # Arguments of the product that activates: a weight, its scales and its bias, twice for a gate.
    activates: list[Any] = []
    if is_gate_of_two(spec.activation, t.weights, t.biases):
        (gate, bias), (up, up_bias) = layers
        activates = [(*gate, bias, *up, up_bias)]
    elif is_one and spec.activation:
        activates = [(*weight, bias) for weight, bias in layers]
    # Scales of 128 elements are computed with them; a single scale from a bound is known before.
    is_bounded = _may_be_bounded(spec, t, recipe)
    stays = t.out_weight is not None and (recipe.input.scaling == "1x128" or is_bounded)
    hidden: list[Tensor] = []
    products: list[Tensor] = []
    residual = t.out_residual
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    if t.out_weight is not None and is_bounded and is_gate(spec.activation):
        of_norm = (t.gamma, t.beta, spec.weight_offset)
        operands = (q, scale, t.weights, t.biases, *how, spec.activation, x.dtype)
        y = gated_mlp(*operands, t.out_weight, t.out_bias, residual, *of_norm)
        outputs = [_in_shape(y, rows)]
        return [*outputs, total] if spec.returns_sum and has_sum(t) else outputs
    if activates:
        for weight, own, bias, *up in activates:
            last = (spec.activation, x.dtype, *up)
            if stays:
                of: Any = {}
                if is_bounded:
                    of = {"gamma": t.gamma, "beta": t.beta, "weight_offset": spec.weight_offset}
                of["has_bound"] = is_bounded
                hidden = hidden_rows(q, scale, weight, own, *how, bias, *last, **of)
            else:
                products.append(scaled.linear(q, scale, weight, own, *how, bias, None, *last))
    else:
        products = _products(q, scale, t.weights, t.biases, recipe, power_of_two, x.dtype)
        if not is_one:
            products = [activated(spec.activation, torch.cat(products, -1))]
    if t.out_weight is not None:
        if products:
            layer = (products[0], [t.out_weight], [t.out_bias])
            products = linears(*layer, recipe, power_of_two, residual)
        else:
            q, scale = hidden
            w, own = quantized.parts(t.out_weight)
            products = [scaled.linear(q, scale, w, own, *how, t.out_bias, residual, "", x.dtype)]
    outputs = [_in_shape(y, rows) for y in products]
    return [*outputs, total] if spec.returns_sum and has_sum(t) else outputs


def _may_be_bounded(spec: Spec, t: Operands, recipe: Recipe) -> bool:
    """Return whether the hidden rows of an MLP may use a scale from their parameters' bound."""
    if not is_compiling() and not frozen.is_any():
        return False
    # Weights that were quantized elsewhere give the same numbers as there.
    return (
        t.out_weight is not None
        and (len(t.weights) == 1 or is_gate_of_two(spec.activation, t.weights, t.biases))
        and has_bound(recipe, spec.activation, spec.eps)
        and not any(map(quantized.is_in_8_bits, (*t.weights, t.out_weight)))
    )


def is_gate_of_two(
    activation: str, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> bool:
    """Return whether one of two layers of the same size gates the other.

    Args:
        activation: The activation.
        weights: Those of the layers.
        biases: Theirs, or None.
    """
    return (
        is_gate(activation)
        and len(weights) == 2
        and weights[0].shape == weights[1].shape
        and (biases[0] is None) == (biases[1] is None)
    )
