"""FP8 Linear layers on the same rows and their gradients as an autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.call import contexts, frozen
from fused_norm.call.memory import in_memory
from fused_norm.ops import quantized
from fused_norm.ops.eight_bits import in_8_bits, in_both_layouts
from fused_norm.ops.part_gradients import of_all_parts
from fused_norm.ops.registration import is_compiling, is_forward_mode
from fused_norm.ops.scaled_layers import layers, layers_backward
from fused_norm.recipes import E5M2, Recipe

# Where the weights are among the arguments of `ScaledLinears`.
_FIRST = 9


class ScaledLinears(torch.autograd.Function):
    """z W^T + b in FP8 for each of several W, or the activation of one, or a gate of one or two.

    Without an activation, one layer may add a residual, before its only rounding. With one, the
    last result may be its maxima, which the layer that multiplies it takes as those of its z.

    The forward saves operands of the backward: z and W in 8 bits, transposed, if the recipe uses
    these there, otherwise unchanged; and the activation's input. It saves W in either case: PyTorch
    then raises its error if W is written before the backward. A W that FSDP2 gathers in 8 bits is
    saved alone, so that its memory can be freed until the backward, which transposes it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        recipe: str,
        power_of_two: bool,
        saves: bool,
        activation: str,
        residual: Tensor | None,
        maxima: Tensor | None,
        leaves_maxima: bool,
        sizes: tuple[int, ...] | None,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        """Return `[..., N]` for each of the weights, which are followed by as many biases.

        That of a single one without an activation may be returned in parts of these sizes.
        """
        count, how = len(parameters) // 2, recipes.find(recipe)
        weights, biases = parameters[:count], parameters[count:]
        needed = ctx.needs_input_grad
        needs_z, needs_weight = needed[0], any(needed[_FIRST : _FIRST + count])
        keeps_rows = saves and needs_weight and how.has_fp8_wgrad
        keeps_weights = saves and needs_z and how.weight == how.weight_for_dgrad
        keeps_h = bool(activation) and saves and any(needed)
        needs = (keeps_h, keeps_rows, keeps_weights)
        last = (residual, maxima, leaves_maxima)
        ys, h, rows, transposed = layers_and_kept(
            z, weights, biases, how, power_of_two, activation, *needs, *last
        )
        by = kept_of_weights(weights, transposed)
        ctx.save_for_backward(*(rows or (z, None)), *(h or (None,)), *by)
        ctx.kind, ctx.sizes = (recipe, power_of_two, activation, count), sizes
        # A layer whose result is not used has no gradient.
        ctx.set_materialize_grads(False)
        if leaves_maxima:
            ctx.mark_non_differentiable(ys[-1])
        return tuple(ys) if sizes is None else ys[0].split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of z, the residual, the weights and the biases."""
        name, power_of_two, activation, count = ctx.kind
        z, z_scale, h, *weights = saved = ctx.saved_tensors
        needed, first = ctx.needs_input_grad, _FIRST - 1
        if ctx.sizes is None:
            dys = dys[: 1 if activation else count]
        else:
            dys = (*of_all_parts(dys, ctx.sizes),)
        has_dy = [dys[0 if activation else i] is not None for i in range(count)]
        found: list[Tensor | None] = [None] * (1 + 2 * count)
        wanted = [0] if needed[0] and any(has_dy) else []
        places = range(1, 1 + 2 * count)
        wanted += [i for i in places if needed[first + i] and has_dy[(i - 1) % count]]
        if wanted:
            by = (weights[:count], weights[count : 2 * count], recipes.find(name), power_of_two)
            with torch.no_grad():
                gradients = gradients_of_layers((z, z_scale, h, activation), dys, *by, wanted)
            for place, gradient in zip(wanted, underivable(gradients, *saved, *dys), strict=True):
                found[place] = gradient
        of_residual = dys[0] if needed[5] else None
        return found[0], None, None, None, None, of_residual, None, None, None, *found[1:]


def underivable(found: Sequence[Tensor | None], *of: Tensor | None) -> list[Tensor | None]:
    """Return gradients that raise an error where they are differentiated.

    Args:
        found: The gradients.
        of: What they depend on.

    Raises:
        NotImplementedError: In forward mode, whose tangents they would drop.
    """
    if is_compiling():
        return [*found]
    if is_forward_mode():
        raise NotImplementedError("FP8 products have no forward-mode derivatives")
    if not torch.is_grad_enabled():
        return [*found]
    # What they depend on may have been saved in 8 bits alone, which autograd does not follow: so
    # that a backward still meets the error, they depend on this as well.
    anything = torch.empty(0, requires_grad=True)
    return [*_Underivable.apply(len(found), *found, anything, *of)]


class _Underivable(torch.autograd.Function):
    """Returns gradients; raises an error where they are differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return as many of the tensors; they depend on all."""
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Raise the error."""
        raise RuntimeError("FP8 layers have no derivatives of gradients")


def kept_of_weights(
    weights: Sequence[Tensor], transposed: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return what a backward needs of weights, their scales, and weights whose writes are noticed.

    Args:
        weights: As given to the forward.
        transposed: The weights in 8 bits, transposed, and then their scales; empty if none are.
    """
    given = (*weights, *[None] * len(weights))
    watched = [w for w in weights if transposed and _is_held(w)]
    return (*(transposed or given), *watched)


def _is_held(weight: Tensor) -> bool:
    """Return whether a weight's memory is held until the backward anyway, so saving it is free.

    Nothing else holds what autocast or a graph made from it.
    """
    if is_compiling():
        return False
    of: Any = weight._base if weight._is_view() else weight
    return bool(of.is_leaf)


def linears(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe,
    power_of_two: bool,
    residual: Tensor | None = None,
    activation: str = "",
) -> list[Tensor]:
    """Return what `ScaledLinears` does, by ops alone, without gradients.

    Args:
        z: Of shape `[..., K]`.
        weights: Each of shape `[N, K]`.
        biases: For each weight one of shape `[N]`, or None.
        recipe: The FP8 recipe.
        power_of_two: Whether scales are rounded up to powers of two.
        residual: What is added to the result of the only weight, in its shape and dtype, or None.
        activation: What is applied to the results, or `""`.
    """
    nothing = (False, False, False)
    how = (recipe, power_of_two, activation, *nothing, residual)
    return layers_and_kept(z, weights, biases, *how)[0]


def layers_and_kept(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe,
    power_of_two: bool,
    activation: str,
    keeps_h: bool,
    keeps_rows: bool,
    keeps_weights: bool,
    residual: Tensor | None = None,
    maxima: Tensor | None = None,
    leaves_maxima: bool = False,
    z_scale: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Return the results, then what a backward needs, if it is kept.

    Args:
        z: Of shape `[..., K]`.
        weights: Each of shape `[N, K]`.
        biases: For each weight one of shape `[N]`, or None.
        recipe: The FP8 recipe.
        power_of_two: Whether scales are rounded up to powers of two.
        activation: What is applied to the results, or `""`.
        keeps_h: Whether the activation's input is kept.
        keeps_rows: Whether z is kept.
        keeps_weights: Whether the weights are kept.
        residual: What is added to the result of the only weight, in its shape and dtype, or None.
        maxima: Those of z, in the format of `scaled_layers.maxima_of`, if they are known.
        leaves_maxima: Whether those of the activation are wanted, as the last result.
        z_scale: The scales of the rows of z if it is in 8 bits, and is not kept; or None.

    Returns:
        The results; the activation's input; z in 8 bits, transposed, and its scales; and the
        weights in 8 bits, transposed, and then their scales.
    """
    parts = list(map(quantized.parts, weights))
    given, scales, are_kept = [q for q, _ in parts], [scale for _, scale in parts], False
    scaling = recipe.weight.scaling
    made: list[Tensor] = []
    keeps_weights = keeps_weights and not any(map(quantized.is_gathered, weights))
    if not is_compiling() and frozen.is_any():
        if keeps_weights and not contexts.may_hold(given):
            given, scales, qs, own = in_both_layouts(given, scaling, power_of_two)
            made = qs + own
        else:
            # 8-bit versions of frozen weights are kept with the weights.
            given, scales, are_kept = in_8_bits(given, scales, scaling, power_of_two)
        keeps_weights = False
    how = (recipe.input.scaling, scaling, power_of_two, weights[0].dtype, are_kept)
    keeps = (keeps_h, keeps_rows, keeps_weights)
    operands = (z, given, scales, [*biases])
    last = (residual, maxima, leaves_maxima, z_scale)
    found: list[Tensor] = layers(*operands, *how, activation, *keeps, *last)
    # Slices: PyTorch's compiler, of 2.11, traces no `pop` in an autograd function.
    left = found[-1:] if leaves_maxima else []
    rest = iter(found[:-1] if leaves_maxima else found)
    ys = [next(rest) for _ in range(1 if activation else len(weights))]
    h, rows = ([next(rest) for _ in range(count)] for count in (keeps_h, 2 * keeps_rows))
    transposed = [*rest]
    return [*ys, *left], h, rows, made or transposed[::2] + transposed[1::2]


def gradients_of_layers(
    saved: tuple[Tensor, Tensor | None, Tensor | None, str],
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    recipe: Recipe,
    power_of_two: bool,
    wanted: list[int],
) -> list[Tensor]:
    """Return the gradients that are wanted: of z, of each weight, of each bias.

    Args:
        saved: z, or its transpose in 8 bits with its scales; the activation's input, or None; and
            the activation.
        dys: The gradients of the results; of one layer, they may be those of parts of its result.
        weights: Each of shape `[N, K]`, or transposed in 8 bits if it has scales; or gathered.
        scales: For each weight its scales, or None.
        recipe: The FP8 recipe.
        power_of_two: Whether scales are rounded up to powers of two.
        wanted: Their places: 0 for z, then those of the weights and of the biases.
    """
    are_kept = False
    given, scales = quantized.for_gradients(weights, scales, wanted[0] == 0)
    if is_compiling():
        # Inductor writes them so; the op would copy others alone.
        dys = [dy if dy is None else dy.contiguous() for dy in dys]
    else:
        dys = in_memory(dys)
        if wanted[0] == 0:
            given, scales, are_kept = in_8_bits(
                given, scales, recipe.weight_for_dgrad.scaling, power_of_two, transposed=True
            )
    how = (*scalings_of_gradients(recipe), power_of_two, recipe.has_fp8_wgrad)
    found: list[Tensor] = layers_backward(*saved, [*dys], given, [*scales], *how, wanted, are_kept)
    return found


def scalings_of_gradients(recipe: Recipe) -> tuple[str, bool, str, str]:
    """Return how ops of gradients quantize: gradients, whether to e5m2, weights and rows."""
    grad = recipe.grad
    weight, rows = recipe.weight_for_dgrad.scaling, recipe.input.scaling
    return grad.scaling, grad.dtype is E5M2, weight, rows


def is_like_product(tensor: Tensor, z: Tensor, weight: Tensor) -> bool:
    """Return whether a tensor has the shape, the dtype and the device of z W^T."""
    shape = (*z.shape[:-1], weight.shape[0])
    return tensor.shape == shape and tensor.dtype is weight.dtype and tensor.device == z.device
