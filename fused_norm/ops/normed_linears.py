"""A norm and FP8 Linear layers on its rows, with gradients, that keep the rows in 8 bits alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import composition, recipes
from fused_norm.composition import Operands, Spec
from fused_norm.norms import NORMS
from fused_norm.ops.eight_bits import serves
from fused_norm.ops.registration import is_compiling
from fused_norm.ops.scaled_linears import gradients_of_layers, kept_of_weights, layers_and_kept
from fused_norm.ops.scaled_norm_rows import LONGEST, norm_rows
from fused_norm.ops.validation import are_strided
from fused_norm.recipes import Recipe
from fused_norm.reference import widened

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
        leaves_maxima: bool,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        """Return `[..., N]` for each of the weights, which are followed by as many biases."""
        count, how = len(parameters) // 2, recipes.find(recipe)
        weights, biases = parameters[:count], parameters[count:]
        keeps_weights = any(ctx.needs_input_grad[:3]) and how.weight == how.weight_for_dgrad
        q, scale, *rows = norm_rows(x, gamma, beta, *norm, how.input.scaling, power_of_two)
        keeps = (bool(activation), False, keeps_weights)
        ys, h, _, transposed = layers_and_kept(
            *(q, weights, biases, how, power_of_two, activation, *keeps),
            leaves_maxima=leaves_maxima,
            z_scale=scale,
        )
        mean = rows[3] if NORMS[norm[0]].has_mean else None
        of_layers = (*rows[:2], *(h or (None,)), *kept_of_weights(weights, transposed))
        ctx.save_for_backward(x, gamma, beta, rows[2], mean, *of_layers)
        ctx.kind = norm, recipe, power_of_two, activation, count
        # A layer whose result is not used has no gradient.
        ctx.set_materialize_grads(False)
        if leaves_maxima:
            ctx.mark_non_differentiable(ys[-1])
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, gamma, beta, the weights and the biases."""
        saved, (*_, activation, count) = ctx.saved_tensors, ctx.kind
        dys = dys[: 1 if activation else count]
        with torch.no_grad():
            found = _gradients(ctx.kind, ctx.needs_input_grad, saved, dys)
        if torch.is_grad_enabled() and not is_compiling():
            found = _Underivable.apply(len(found), *found, *saved, *dys)
        return *found[:3], *[None] * (_FIRST - 3), *found[3:]


class _Underivable(torch.autograd.Function):
    """Returns gradients; raises an error where they are differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return as many of the tensors; they depend on all."""
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Raise the error."""
        raise RuntimeError("FP8 layers on a norm have no derivatives of gradients")


def _gradients(
    kind: tuple[Any, ...],
    needed: Sequence[bool],
    saved: Sequence[Any],
    dys: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of x, gamma, beta, the weights and the biases."""
    norm, recipe, power_of_two, activation, count = kind
    x, gamma, beta, rstd, mean, z, z_scale, h, *weights = saved
    has_dy = [dys[0 if activation else i] is not None for i in range(count)]
    found: list[Tensor | None] = [None] * (3 + 2 * count)
    wanted = [0] if any(needed[:3]) and any(has_dy) else []
    wanted += [1 + i for i in range(2 * count) if needed[_FIRST + i] and has_dy[i % count]]
    if not wanted:
        return found
    by = (weights[:count], weights[count : 2 * count], recipes.find(recipe), power_of_two)
    rows = (z, z_scale, h, activation)
    for place, gradient in zip(wanted, gradients_of_layers(rows, dys, *by, wanted), strict=True):
        if place:
            found[2 + place] = gradient
        else:
            t = Operands(x, None, gamma, beta)
            found[:3] = _norm_gradients(gradient, t, norm, mean, rstd, needed[:3])
    return found


def _norm_gradients(
    dz: Tensor,
    t: Operands,
    norm: tuple[str, float, float],
    mean: Tensor | None,
    rstd: Any,
    wanted: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of x, gamma and beta, as PyTorch's norm has them."""
    spec = Spec(norm[0], eps=norm[1], weight_offset=norm[2])
    if t.x.is_cpu and not is_compiling():
        return _by_autograd(dz, t, spec, wanted)
    x, gamma, beta = t.x, t.gamma, t.beta
    is_wide = not composition.is_rounded_once(spec, x, t)
    if is_wide:
        dz, x = widened(dz), widened(x)
        gamma, beta = (None if v is None else widened(v) for v in (gamma, beta))
    if gamma is not None and spec.weight_offset:
        gamma = gamma + spec.weight_offset
    features, aten = [x.shape[-1]], torch.ops.aten
    has_gamma, has_beta = (wanted[i] and t[1 + i] is not None for i in (1, 2))
    if mean is not None:
        masks = [wanted[0], has_gamma, has_beta]
        found = aten.native_layer_norm_backward(dz, x, features, mean, rstd, gamma, beta, masks)
    else:
        masks = [wanted[0], has_gamma]
        found = aten._fused_rms_norm_backward(dz, x, features, rstd, gamma, masks)
        found = (*found, dz.reshape(-1, features[0]).sum(0) if has_beta else None)
    masks = [wanted[0], has_gamma, has_beta]
    pairs = zip(found, masks, strict=True)
    return [None if not has else v.to(t.x.dtype) for v, has in pairs]


def _by_autograd(
    dz: Tensor, t: Operands, spec: Spec, wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the same where PyTorch has no op for it: by the norm, computed again."""
    with torch.enable_grad():
        leaves: list[Any] = [
            None if v is None else v.detach().requires_grad_(w)
            for v, w in zip((t.x, t.gamma, t.beta), wanted, strict=True)
        ]
        z = composition.normalized(spec, leaves[0], Operands(leaves[0], None, *leaves[1:]))
    found = iter(torch.autograd.grad(z, [v for v, w in zip(leaves, wanted, strict=True) if w], dz))
    return [next(found) if w else None for w in wanted]


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
        and are_strided((*affine, *summands, *t.weights), x)
        and all(v.dtype is x.dtype for v in (*affine, *summands))
        and all(v.shape == x.shape[-1:] for v in affine)
        and all(v.shape == x.shape for v in summands)
        and any(w.requires_grad for w in t.weights)
    )
