"""A norm and both layers of an MLP in FP8, with gradients that one op computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.activations import is_gate
from fused_norm.composition import Operands, Spec
from fused_norm.ops import quantized
from fused_norm.ops.normed_linears import normed_and_kept, with_norm
from fused_norm.ops.registration import each_once
from fused_norm.ops.scaled_linears import (
    is_like_product,
    kept_of_weights,
    layers_and_kept,
    underivable,
)
from fused_norm.ops.scaled_mlp import gradients_of_mlp
from fused_norm.ops.validation import are_strided

# Where the weights are among the arguments of `NormedMlp`.
_FIRST = 9


class NormedMlp(torch.autograd.Function):
    """`NormedLinears` with an activation, and `ScaledLinears` of a single layer on that.

    Both layers are one function so that the product of the second one's weight can store the
    gradient before the activation. It saves what both functions save, and raises their errors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        residual: Tensor | None,
        norm: tuple[str, float, float],
        recipe: str,
        power_of_two: bool,
        activation: str,
        leaves_maxima: bool,
        *parameters: Any,
    ) -> Tensor:
        """Return `[..., K2]`: weights are followed by as many biases, and the second layer's."""
        count, how = len(parameters) // 2 - 1, recipes.find(recipe)
        layers = (parameters[:count], parameters[count : 2 * count], activation)
        out_weight, out_bias = parameters[2 * count :]
        needed = ctx.needs_input_grad
        hidden, first = normed_and_kept(
            *((x, gamma, beta), norm, layers, how, power_of_two),
            any(needed[:3]),
            leaves_maxima,
        )
        a = hidden[0]
        keeps = (False, needed[_FIRST + 2 * count], how.weight == how.weight_for_dgrad)
        last = (residual, hidden[1] if leaves_maxima else None)
        operands = (a, [out_weight], [out_bias], how, power_of_two, "")
        ys, _, rows, transposed = layers_and_kept(*operands, *keeps, *last)
        second = (*(rows or (a, None)), *kept_of_weights([out_weight], transposed))
        ctx.save_for_backward(*first, *second)
        ctx.kind = norm, recipe, power_of_two, activation, count, len(first)
        ctx.set_materialize_grads(False)
        return ys[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, gamma, beta, the residual, and the layers' parameters."""
        needed, saved = ctx.needs_input_grad, ctx.saved_tensors
        if dy is None:
            return (None,) * len(needed)
        with torch.no_grad():
            found = _gradients(ctx.kind, needed, saved, dy)
        found = underivable(found, *saved, dy)
        of_residual = dy if needed[3] else None
        return *found[:3], of_residual, *[None] * (_FIRST - 4), *found[3:]


def _gradients(
    kind: tuple[Any, ...], needed: Sequence[bool], saved: Sequence[Any], dy: Tensor
) -> list[Tensor | None]:
    """Return the gradients of x, gamma, beta, the weights, the biases, and the second layer's."""
    norm, recipe, power_of_two, activation, count, size = kind
    z, z_scale, h, *weights = saved[5:size]
    a, a_scale, out_weight, out_scale, *_ = saved[size:]
    first = (z, z_scale, h, activation, weights[:count], weights[count : 2 * count])
    flags = [any(needed[:3]), *needed[_FIRST:]]
    wanted = [place for place, is_wanted in enumerate(flags) if is_wanted]
    gradients: list[Tensor] = []
    if wanted:
        how = (recipes.find(recipe), power_of_two)
        second = (a, a_scale, out_weight, out_scale)
        gradients = gradients_of_mlp(first, second, dy, *how, wanted)
    pairs = dict(zip(wanted, gradients, strict=True))
    return with_norm(pairs, 2 * count + 2, saved, norm, needed[:3])


def normed_mlp(
    spec: Spec,
    t: Operands,
    x: Tensor,
    biases: Sequence[Tensor | None],
    recipe: str,
    power_of_two: bool,
    leaves_maxima: bool,
) -> Tensor:
    """Return the result of a call that `is_mlp` accepts.

    Args:
        spec: What to compute.
        t: The tensors.
        x: What is normalized.
        biases: Those of the first layers, each of the size of a result.
        recipe: One of RECIPES.
        power_of_two: Whether scales are rounded up to powers of two.
        leaves_maxima: Whether the activation's product keeps its maxima for the second layer.
    """
    weight: Any = t.out_weight
    bias = None if t.out_bias is None else t.out_bias.expand(weight.shape[0])
    residual = t.out_residual
    is_added = residual is not None and is_like_product(residual, x, weight)
    added = residual if is_added else None
    norm = (spec.normalization, spec.eps, spec.weight_offset)
    how = (norm, recipe, power_of_two, spec.activation, leaves_maxima)
    rows = (x, t.gamma, t.beta, added)
    given = each_once([*rows, *t.weights, *biases, weight, bias])
    y: Tensor = NormedMlp.apply(*given[: len(rows)], *how, *given[len(rows) :])
    return y if residual is None or is_added else residual + y


def is_mlp(spec: Spec, t: Operands) -> bool:
    """Return whether a call whose norm and first layers are `NormedLinears` is a `NormedMlp`.

    Args:
        spec: What to compute, with an activation that one op computes.
        t: The tensors.
    """
    if t.out_weight is None:
        return False
    size = sum(len(w) for w in t.weights) // (2 if is_gate(spec.activation) else 1)
    others = [v for v in (t.out_bias, t.out_residual) if v is not None]
    return (
        t.out_weight.dtype is t.x.dtype
        and t.out_weight.shape[-1] == size
        and (t.out_bias is None or t.out_bias.dtype is t.x.dtype)
        and are_strided((quantized.values(t.out_weight), *others), t.x)
    )
