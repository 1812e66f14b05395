"""A norm and FP8 Linear layers on its rows, with gradients, that keep the rows in 8 bits alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import composition, recipes
from fused_norm.composition import Operands, Spec
from fused_norm.norms import NORMS
from fused_norm.ops import quantized
from fused_norm.ops.eight_bits import serves
from fused_norm.ops.norm_gradients import norm_gradients
from fused_norm.ops.part_gradients import of_all_parts
from fused_norm.ops.scaled_linears import (
    gradients_of_layers,
    kept_of_weights,
    layers_and_kept,
    underivable,
)
from fused_norm.ops.scaled_norm_rows import LONGEST, norm_rows
from fused_norm.ops.validation import are_strided
from fused_norm.recipes import Recipe

# Where the weights are among the arguments of `NormedLinears`.
_FIRST = 8


class NormedLinears(torch.autograd.Function):
    """`ScaledLinears` on the rows of a norm, which are written in 8 bits only.

    The forward saves x and the statistics of its rows for the norm's gradients, and for those of
    the layers what `ScaledLinears` saves: the rows and the weights in 8 bits, transposed. PyTorch
    raises its error if x or a parameter is written before the backward, and if the backward is
    differentiated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        norm: tuple[str, float, float],
        recipe: str,
        power_of_two: bool,
        activation: str,
        sizes: tuple[int, ...] | None,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        """Return `[..., N]` for each of the weights, which are followed by as many biases.

        That of a single one may be returned in parts of these sizes.
        """
        count = len(parameters) // 2
        layers = (parameters[:count], parameters[count:], activation)
        how = (recipes.find(recipe), power_of_two)
        trains_rows = any(ctx.needs_input_grad[:3])
        ys, kept = normed_and_kept((x, gamma, beta), norm, layers, *how, trains_rows)
        ctx.save_for_backward(*kept)
        ctx.kind, ctx.sizes = (norm, recipe, power_of_two, activation, count), sizes
        # A layer whose result is not used has no gradient.
        ctx.set_materialize_grads(False)
        return tuple(ys) if sizes is None else ys[0].split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, gamma, beta, the weights and the biases."""
        saved = ctx.saved_tensors
        with torch.no_grad():
            given = dys if ctx.sizes is None else of_all_parts(dys, ctx.sizes)
            found = _gradients(ctx.kind, ctx.needs_input_grad, saved, given)
        found = underivable(found, *saved, *dys)
        return *found[:3], *[None] * (_FIRST - 3), *found[3:]


def normed_and_kept(
    rows: tuple[Tensor, Tensor | None, Tensor | None],
    norm: tuple[str, float, float],
    layers: tuple[Sequence[Tensor], Sequence[Tensor | None], str],
    recipe: Recipe,
    power_of_two: bool,
    trains_rows: bool,
    leaves_maxima: bool = False,
) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """Return the results of layers on a norm, then what a backward of both needs.

    Args:
        rows: x, gamma and beta.
        norm: Its name, eps and what is added to gamma.
        layers: The weights, the biases, and the activation of the results or `""`.
        recipe: The FP8 recipe.
        power_of_two: Whether scales are rounded up to powers of two.
        trains_rows: Whether x, gamma or beta has a gradient.
        leaves_maxima: Whether those of the activation are wanted, as the last result.

    Returns:
        The results; and x, gamma, beta, rstd, the mean, the normalized rows and their scales, the
        activation's input, and what `kept_of_weights` returns.
    """
    weights, biases, activation = layers
    q, scale, *found = norm_rows(*rows, *norm, recipe.input.scaling, power_of_two)
    keeps_weights = trains_rows and recipe.weight == recipe.weight_for_dgrad
    ys, h, _, transposed = layers_and_kept(
        *(q, weights, biases, recipe, power_of_two, activation),
        *(bool(activation), False, keeps_weights),
        leaves_maxima=leaves_maxima,
        z_scale=scale,
    )
    mean = found[3] if NORMS[norm[0]].has_mean else None
    of_layers = (*found[:2], *(h or (None,)), *kept_of_weights(weights, transposed))
    return ys, (*rows, found[2], mean, *of_layers)


def _gradients(
    kind: tuple[Any, ...],
    needed: Sequence[bool],
    saved: Sequence[Any],
    dys: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of x, gamma, beta, the weights and the biases."""
    norm, recipe, power_of_two, activation, count = kind
    z, z_scale, h, *weights = saved[5:]
    has_dy = [dys[0 if activation else i] is not None for i in range(count)]
    wanted = [0] if any(needed[:3]) and any(has_dy) else []
    wanted += [1 + i for i in range(2 * count) if needed[_FIRST + i] and has_dy[i % count]]
    gradients: list[Tensor] = []
    if wanted:
        by = (weights[:count], weights[count : 2 * count], recipes.find(recipe), power_of_two)
        gradients = gradients_of_layers((z, z_scale, h, activation), dys, *by, wanted)
    pairs = dict(zip(wanted, gradients, strict=True))
    return with_norm(pairs, 2 * count, saved, norm, needed[:3])


def with_norm(
    gradients: dict[int, Tensor],
    count: int,
    saved: Sequence[Any],
    norm: tuple[str, float, float],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of x, gamma and beta, then those of parameters; None if not wanted.

    Args:
        gradients: By place: 0 for the normalized rows, then those of the parameters.
        count: How many parameters there are.
        saved: What `normed_and_kept` returned.
        norm: The norm's name, eps and what is added to gamma.
        needed: Whether x, gamma and beta have a gradient.
    """
    of_norm: Sequence[Tensor | None] = [None] * 3
    if 0 in gradients:
        x, gamma, beta, rstd, mean = saved[:5]
        t = Operands(x, None, gamma, beta)
        of_norm = norm_gradients(gradients[0], t, norm, mean, rstd, needed)
    return [*of_norm, *(gradients.get(1 + i) for i in range(count))]


def is_normed(spec: Spec, t: Operands, recipe: Recipe) -> bool:
    """Return whether `NormedLinears` computes the norm of a call and its layers, with gradients.

    Args:
        spec: What to compute.
        t: The tensors. Autocast converts none of them.
        recipe: The FP8 recipe.
    """
    x, affine = t.x, [v for v in (t.gamma, t.beta) if v is not None]
    summands = [] if t.residual is None else [t.residual]
    return (
        x.dtype is torch.bfloat16
        and recipe.has_fp8_wgrad
        and recipe.input.scaling in ("row", "tensor")
        # On their own, PyTorch's ops are better off with the norm's own backward.
        and serves(x, recipe.input.scaling)
        and not spec.returns_norm
        and composition.first(t, "groups", "statistics") is None
        and x.dim() > 0
        and x.numel() > 0
        and x.shape[-1] <= LONGEST
        and are_strided((*affine, *summands, *map(quantized.values, t.weights)), x)
        and all(v.dtype is x.dtype for v in (*affine, *summands))
        and all(v.shape == x.shape[-1:] for v in affine)
        and all(v.shape == x.shape for v in summands)
        and any(w.requires_grad for w in t.weights)
    )
