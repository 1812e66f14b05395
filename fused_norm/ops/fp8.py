"""The op family in FP8: which calls use it, and how those with gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import composition, recipes
from fused_norm.activations import after_products
from fused_norm.call import contexts
from fused_norm.composition import Operands, Spec, first
from fused_norm.ops import quantized, scaled
from fused_norm.ops.autocast import cast, dtype_of_products
from fused_norm.ops.eight_bits import serves
from fused_norm.ops.fp8_inference import inference, is_gate_of_two
from fused_norm.ops.invariance import is_batch_invariant
from fused_norm.ops.main_grad import added
from fused_norm.ops.normed_linears import NormedLinears, is_normed
from fused_norm.ops.normed_mlp import is_mlp, normed_mlp
from fused_norm.ops.operands import fits
from fused_norm.ops.registration import is_compiling, is_exporting
from fused_norm.ops.rounding import RoundedToOdd
from fused_norm.ops.scaled_linears import ScaledLinears, is_like_product, linears
from fused_norm.recipes import Recipe

_NOT_INVARIANT = "batch_invariant() has no FP8 products"


def call(
    spec: Spec,
    t: Operands,
    recipe: str,
    owners: Sequence[Tensor | None] | None = None,
    sizes: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Compute a call of the family with its Linear layers in FP8.

    Args:
        spec: What to compute.
        t: The tensors.
        recipe: One of RECIPES.
        owners: The Parameter whose `main_grad` gets each weight's gradient, or None.
        sizes: Those of the parts in which the only output is returned if an autograd function
            records the call; None for one output.

    Raises:
        ValueError: If the recipe is not known.
        RuntimeError: If the device has no FP8, sizes are not multiples of 16, or rows have to be
            batch invariant.
    """
    how = recipes.find(recipe)
    if spec.batch_invariant:
        raise RuntimeError(_NOT_INVARIANT)
    weights = [*t.weights, *([] if t.out_weight is None else [t.out_weight])]
    is_cast = dtype_of_products(t.x) is not None
    for weight in t.weights:
        if t.x.shape[-1:] != weight.shape[-1:] or not (is_cast or t.x.dtype is weight.dtype):
            # Raises PyTorch's error.
            return composition.compute(spec, t)
    scaled.require_fp8(t.x, weights)
    for weight in weights:
        quantized.require_recipe(weight, recipe, composition.flat(t))
    power_of_two = _scales_are_rounded(how, weights)
    if not is_cast and _is_fused(spec, t):
        return inference(spec, t, how, power_of_two)
    if owners is not None:
        t = t._replace(weights=added(t.weights, owners))

    of_recipe = (recipe, power_of_two)
    # An activation and its maxima, which the layer that multiplies it quantizes it by.
    left: list[Tensor] = []
    norm = (t.gamma, t.beta, (spec.normalization, spec.eps, spec.weight_offset))

    def normed_layers(
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: str,
        is_joined: bool,
    ) -> list[Tensor]:
        pairs = zip(weights, biases, strict=True)
        bs = [_as_in_linear(x, w, b, None, power_of_two)[1] for w, b in pairs]
        if has_mlp:
            leaves = leaves_maxima(x, recipe, t.out_weight)
            return [normed_mlp(spec, t, x, bs, *of_recipe, leaves)]
        if _is_one(activation, weights, biases, is_joined):
            return [*NormedLinears.apply(x, *norm, *of_recipe, activation, None, *weights, *bs)]
        products = NormedLinears.apply(x, *norm, *of_recipe, "", sizes, *weights, *bs)
        return after_products([*products], activation, is_joined)

    def layers(
        z: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: str,
        is_joined: bool,
        residual: Tensor | None = None,
    ) -> list[Tensor]:
        if _is_one(activation, weights, biases, is_joined) and not any(
            map(quantized.is_quantized, weights)
        ):
            leaves = leaves_maxima(z, recipe, t.out_weight)
            last = (*of_recipe, activation)
            products = _multiplied(z, weights, biases, *last, leaves_maxima=leaves)
            if leaves:
                left.extend(products)
            return products[:1]
        maxima = left[1] if left and z is left[0] else None
        more: Any = {"residual": residual, "maxima": maxima, "sizes": sizes}
        products = _multiplied(z, weights, biases, *of_recipe, **more)
        return after_products(products, activation, is_joined)

    is_plain = not is_cast and not is_exporting() and not any(map(quantized.is_quantized, weights))
    if not (is_plain and _is_recorded(t) and is_normed(spec, t, how)):
        return composition.compute(spec, t, layers)
    has_mlp = _is_one(spec.activation, t.weights, t.biases, spec.is_joined) and is_mlp(spec, t)
    if has_mlp:
        # Of this, `compute` has the norm's input and results; the closure has the second layer.
        before = t._replace(out_weight=None, out_bias=None, out_residual=None)
        return composition.compute(spec, before, layers, normed_layers)
    return composition.compute(spec, t, layers, normed_layers)


def _is_one(
    activation: str, weights: Sequence[Tensor], biases: Sequence[Tensor | None], is_joined: bool
) -> bool:
    """Return whether one op computes layers and their activation."""
    is_pair = is_joined and is_gate_of_two(activation, weights, biases)
    return bool(activation) and (len(weights) == 1 or is_pair)


def _is_recorded(t: Operands) -> bool:
    """Return whether autograd records a call."""
    tensors = [v for v in composition.flat(t) if v is not None]
    return torch.is_grad_enabled() and any(v.requires_grad for v in tensors)


def _is_fused(spec: Spec, t: Operands) -> bool:
    """Return whether a call needs no gradient, and the ops support all of it after a norm."""
    return (
        not _is_recorded(t)
        and first(t, "groups", "statistics") is None
        and not spec.returns_norm
        and fits(spec, t)
    )


def scaled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, recipe: str
) -> Tensor:
    """Return x W^T + b + residual in FP8: a Linear layer without a norm, and what is added to it.

    The residual is added before the only rounding if it has the shape and the dtype of the result,
    otherwise as in PyTorch.

    Args:
        x: Of shape `[..., K]`.
        weight: Of shape `[N, K]`.
        bias: Of shape `[N]`, or None.
        residual: Of shape `[..., N]`, or None.
        recipe: One of RECIPES.

    Raises:
        RuntimeError: As in `call`.
    """
    how = recipes.find(recipe)
    if is_batch_invariant():
        raise RuntimeError(_NOT_INVARIANT)
    scaled.require_fp8(x, [weight])
    quantized.require_recipe(weight, recipe, [x, bias])
    power_of_two = _scales_are_rounded(how, [weight])
    return _multiplied(x, [weight], [bias], recipe, power_of_two, residual=residual)[0]


def _multiplied(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: str,
    power_of_two: bool,
    activation: str = "",
    residual: Tensor | None = None,
    maxima: Tensor | None = None,
    leaves_maxima: bool = False,
    sizes: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Return the products, or an activation of them; then its maxima, if it leaves these.

    Args:
        z: Of shape `[..., K]`.
        weights: Each of shape `[N, K]`.
        biases: For each weight one of shape `[N]`, or None.
        recipe: One of RECIPES.
        power_of_two: Whether scales are rounded up to powers of two.
        activation: What is applied to the products, or `""`.
        residual: What is added to the only product, or None.
        maxima: Those of z, in the format of `scaled_layers.maxima_of`, if they are known.
        leaves_maxima: Whether those of the activation are wanted, where gradients are recorded.
        sizes: As for `call`.
    """
    dtype = dtype_of_products(z)
    if dtype is not None:
        # Kernels need this dtype: norms return float32 there.
        z = cast(dtype, z)[0]
    pairs = [
        (w, b) if quantized.is_quantized(w) else _as_in_linear(z, w, b, dtype, power_of_two)
        for w, b in zip(weights, biases, strict=True)
    ]
    ws, bs = [w for w, _ in pairs], [b for _, b in pairs]
    are_quantized = any(quantized.is_quantized(w) for w in ws)
    added = None
    if residual is not None and is_like_product(residual, z, ws[0]):
        follows = residual.requires_grad and torch.is_grad_enabled()
        # A quantized weight has no gradient, and neither has what its product adds.
        added = None if are_quantized and follows else residual
    if are_quantized or is_exporting():
        ys = linears(z, ws, bs, recipes.find(recipe), power_of_two, added, activation)
    else:
        how = (recipe, power_of_two, torch.is_grad_enabled(), activation, added)
        ys = list(ScaledLinears.apply(z, *how, maxima, leaves_maxima, sizes, *ws, *bs))
    return ys if residual is None or added is not None else [residual + ys[0]]


def leaves_maxima(z: Tensor, recipe: str, next_weight: Tensor | None) -> bool:
    """Return whether a product should leave the maxima of its activation for the next layer.

    Hopper's kernels do so as they store. The next layer then needs no pass that finds them, where
    it quantizes rows in both layouts, for the gradient of its weight.

    Args:
        z: The input of the product, on its device.
        recipe: One of RECIPES.
        next_weight: The weight that the activation is multiplied by, None if it is by none.
    """
    how = recipes.find(recipe)
    return (
        how.has_fp8_wgrad
        and how.input.scaling in ("row", "tensor")
        and (dtype_of_products(z) or z.dtype) is torch.bfloat16
        and torch.is_grad_enabled()
        and next_weight is not None
        and next_weight.requires_grad
        and not is_exporting()
        and serves(z, how.input.scaling, how.weight.scaling)
    )


def adds_in_product(x: Tensor, recipe: str) -> bool:
    """Return whether a Linear layer's product in FP8 should add a residual, not the op after it.

    Hopper's kernels do so as they store, at no cost. Elsewhere PyTorch's ops add it in a pass of
    their own, and a norm that follows reads both summands in less time.

    Args:
        x: The layer's input, on its device.
        recipe: One of RECIPES.
    """
    how = recipes.find(recipe)
    return x.dtype is torch.bfloat16 and serves(x, how.input.scaling, how.weight.scaling)


def _as_in_linear(
    z: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, power_of_two: bool
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias as `F.linear` uses them, except for the rounding of the weight.

    Args:
        z: Of shape `[..., K]`.
        weight: Should be of shape `[N, K]`.
        bias: Should be None, or broadcast against `[N]`.
        dtype: Autocast's, or None.
        power_of_two: Whether scales are powers of two.

    Raises:
        RuntimeError: Like `F.linear`, if shapes or dtypes disagree.
    """
    if dtype is torch.bfloat16 and weight.dtype is torch.float32 and power_of_two:
        weight, (bias,) = RoundedToOdd.apply(weight), cast(dtype, bias)
    elif dtype is not None:
        weight, bias = cast(dtype, weight, bias)
    elif not all(v is None or v.dtype is z.dtype for v in (weight, bias)):
        F.linear(z, weight, bias)
    if z.shape[-1] != weight.shape[-1]:
        F.linear(z, weight, bias)
    return weight, None if bias is None else bias.expand(weight.shape[0])


def _scales_are_rounded(recipe: Recipe, weights: Sequence[Tensor]) -> bool:
    """Return whether scales are rounded up to powers of two: if such weights are trained."""
    trains = any(w.requires_grad for w in weights)
    return recipe.power_of_two and trains and not _are_frozen(weights)


def _are_frozen(weights: Sequence[Tensor]) -> bool:
    """Return whether weights are frozen for good: those of a context may be trained meanwhile."""
    if is_compiling():
        return False
    found = contexts.find(weights, meets=False)
    return found is not None and not found[0].trains
