"""The gradients of both layers of an MLP in FP8, and of the activation between them: one op.

On Hopper the chain (chain/eight_bits_mlp.h) runs a product that stores the gradient before the
activation, from what its accumulators hold, and keeps that gradient's largest magnitudes: the
activation's own gradient is neither rounded nor written. Elsewhere it is two ops of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fused_norm.ops import quantized
from fused_norm.ops.eight_bits import in_8_bits
from fused_norm.ops.flops import count_flops
from fused_norm.ops.registration import define, is_compiling, unseen
from fused_norm.ops.scaled_layers import backward_flops, fake_layers_backward, layers_backward
from fused_norm.ops.scaled_linears import scalings_of_gradients
from fused_norm.recipes import Recipe


def _split(wanted: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return the places of gradients among those of the first layers, and of the second."""
    of_first = [place for place in wanted if place <= 2 * count]
    of_second = [place - 2 * count for place in wanted if place > 2 * count]
    return of_first, [0] * bool(of_first) + of_second


def _of_layers(run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Return what computes the op by one that computes gradients of layers."""

    def backward(
        z: Tensor,
        z_scale: Tensor | None,
        h: Tensor,
        activation: str,
        weights: Sequence[Tensor],
        weight_scales: Sequence[Tensor | None],
        a: Tensor,
        a_scale: Tensor | None,
        out_weight: Tensor,
        out_scale: Tensor | None,
        dy: Tensor,
        *rest: Any,
    ) -> list[Tensor]:
        *how, wanted, are_kept = rest
        of_first, of_second = _split(wanted, len(weights))
        second = (a, a_scale, None, "", [dy], [out_weight], [out_scale])
        found = iter(run(*second, *how, of_second, are_kept))
        first = list[Tensor]()
        if of_first:
            operands = (z, z_scale, h, activation, [next(found)], [*weights], [*weight_scales])
            first = run(*operands, *how, of_first, are_kept)
        by_place = dict(zip(of_first, first, strict=True))
        return [by_place[place] if place in by_place else next(found) for place in wanted]

    return backward


# The gradients of the rows (place 0), of each weight and each bias of the first layers, then of the
# second layer's weight and bias, as far as they are wanted.
mlp_backward = define(
    "fp8_mlp_backward(Tensor z, Tensor? z_scale, Tensor h, str activation, Tensor[] weights, "
    "Tensor?[] weight_scales, Tensor a, Tensor? a_scale, Tensor out_weight, Tensor? out_scale, "
    "Tensor grad_output, str grad_scaling, bool is_e5m2, str weight_scaling, str scaling, "
    "bool power_of_two, bool has_fp8_wgrad, int[] wanted, bool are_kept) -> Tensor[]",
    _of_layers(fake_layers_backward),
    unseen(_of_layers(layers_backward)),
)


def gradients_of_mlp(
    first: tuple[Tensor, Tensor | None, Tensor, str, Sequence[Tensor], Sequence[Tensor | None]],
    second: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    dy: Tensor,
    recipe: Recipe,
    power_of_two: bool,
    wanted: list[int],
) -> list[Tensor]:
    """Return the gradients that are wanted, of the op's places.

    Args:
        first: The rows and scales as for `gradients_of_layers`, the activation's input, the
            activation, and the weights and scales of the layers before it.
        second: The same of the layer after it: the activation, its scales, the weight, its scales.
        dy: The gradient of the result.
        recipe: The FP8 recipe.
        power_of_two: Whether scales are rounded up to powers of two.
        wanted: Their places, from the first on.
    """
    *rows, weights, scales = first
    *columns, out_weight, out_scale = second
    given, own = quantized.for_gradients(weights, scales, wanted[0] == 0)
    reads_out, are_kept = wanted[0] <= 2 * len(weights), False
    out, out_own = quantized.for_gradients([out_weight], [out_scale], reads_out)
    if not is_compiling() and reads_out:
        how = (recipe.weight_for_dgrad.scaling, power_of_two)
        out, out_own, are_kept = in_8_bits(out, out_own, *how, transposed=True)
        if wanted[0] == 0:
            given, own, were_kept = in_8_bits(given, own, *how, transposed=True)
            are_kept = are_kept and were_kept
    last = (*scalings_of_gradients(recipe), power_of_two, recipe.has_fp8_wgrad, wanted, are_kept)
    found: list[Tensor] = mlp_backward(*rows, given, own, *columns, *out, *out_own, dy, *last)
    return found


def _flops(
    z: Tensor,
    z_scale: Any,
    h: Tensor,
    activation: str,
    weights: Any,
    scales: Any,
    a: Tensor,
    a_scale: Any,
    out_weight: Any,
    out_scale: Any,
    dy: Tensor,
    *rest: Any,
) -> int:
    *how, wanted, are_kept = rest
    of_first, of_second = _split(wanted, len(weights))
    second = (a, a_scale, None, "", [dy], [out_weight], [out_scale])
    first = (z, z_scale, h, activation, [h], weights, scales)
    found = backward_flops(*second, *how, of_second, are_kept)
    return found + backward_flops(*first, *how, of_first, are_kept)


count_flops("fp8_mlp_backward", _flops)
