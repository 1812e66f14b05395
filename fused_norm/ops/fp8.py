"""The op family in FP8: its products, their gradients, and calls in inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import composition, recipes
from fused_norm.activations import is_gate
from fused_norm.call import frozen
from fused_norm.composition import Operands, Spec, first, has_sum
from fused_norm.ops import quantized, scaled
from fused_norm.ops.autocast import cast, dtype_of_products
from fused_norm.ops.eight_bits import quantize
from fused_norm.ops.main_grad import added
from fused_norm.ops.operands import fits
from fused_norm.recipes import Recipe


class ScaledLinears(torch.autograd.Function):
    """z W^T + b in FP8 for each W of several. The forward saves z and W as they came."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, recipe: str, power_of_two: bool, *parameters: Any
    ) -> tuple[Tensor, ...]:
        """Return `[..., N]` for each of the weights, which come before as many biases."""
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(z, *weights)
        ctx.kind = recipe, power_of_two
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        # A layer whose result is not used has no gradient.
        ctx.set_materialize_grads(False)
        return tuple(linears(z, weights, biases, recipes.find(recipe), power_of_two))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of z, the weights and the biases."""
        z, *weights = ctx.saved_tensors
        name, power_of_two = ctx.kind
        recipe, count = recipes.find(name), len(weights)
        wants, wants_dz = ctx.needs_input_grad[3:], ctx.needs_input_grad[0]
        dz: Tensor | None = None
        dweights: list[Tensor | None] = [None] * count
        dbiases: list[Tensor | None] = [None] * count
        x = z.reshape(-1, z.shape[-1])
        turned: list[Tensor] = []
        for i, (weight, dy) in enumerate(zip(weights, dys, strict=True)):
            if dy is None:
                continue
            rows = dy.reshape(-1, dy.shape[-1])
            turns = wants[i] and recipe.has_fp8_wgrad
            q: list[Tensor] = []
            if wants_dz or turns:
                q = quantize(rows, recipe.grad, power_of_two, plain=wants_dz, turned=turns)
            if wants_dz:
                part = _input_gradient(q[:2], weight, recipe, power_of_two, dy.dtype)
                dz = part if dz is None else dz + part
            if turns:
                turned = turned or quantize(x, recipe.input, power_of_two, plain=False, turned=True)
                how = (recipe.grad.scaling, recipe.input.scaling, power_of_two)
                dweight = scaled.linear(*q[-2:], *turned, *how, None, None, "", dy.dtype)
                dweights[i] = dweight.to(weight.dtype)
            elif wants[i]:
                dweights[i] = (rows.t() @ x.to(dy.dtype)).to(weight.dtype)
            if wants[count + i]:
                dbiases[i] = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtypes[i])
        if dz is not None:
            dz = dz.reshape(z.shape).to(z.dtype)
        return dz, None, None, *dweights, *dbiases


def linears(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe,
    power_of_two: bool,
) -> list[Tensor]:
    """Return z W^T + b, `[..., N]` in the dtype of the weight, for each weight.

    Args:
        z: Of shape `[..., K]`.
        weights: Each of shape `[N, K]`.
        biases: For each one of shape `[N]`, or None.
        recipe: How.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    q = quantize(z.reshape(-1, z.shape[-1]), recipe.input, power_of_two)
    products = _products(q, weights, biases, recipe, power_of_two, weights[0].dtype)
    return [_in_shape(y, z.shape[:-1]) for y in products]


def _products(
    q: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe,
    power_of_two: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the products of rows in 8 bits with all weights, in one launch where that pays."""
    how = (recipe.input.scaling, recipe.weight.scaling, power_of_two)
    numbers, scales = zip(*map(quantized.parts, weights), strict=True)
    if len(weights) == 1:
        return [scaled.linear(*q, numbers[0], scales[0], *how, biases[0], None, "", dtype)]
    found: list[Tensor] = scaled.linears(*q, [*numbers], [*scales], *how, [*biases], dtype)
    return found


def _in_shape(y: Tensor, rows: Sequence[int]) -> Tensor:
    """Return `[M, N]` as `[*rows, N]`, and no view: as that of `F.linear` it may be written."""
    found: Tensor = torch.ops.aten._unsafe_view(y, [*rows, y.shape[-1]])
    return found


def _input_gradient(
    q: Sequence[Tensor], weight: Tensor, recipe: Recipe, power_of_two: bool, dtype: torch.dtype
) -> Tensor:
    """Return dy W, `[M, K]`.

    Args:
        q: dy in 8 bits, `[M, N]`, and its scales.
        weight: Of shape `[N, K]`.
        recipe: How.
        power_of_two: Whether scales are rounded up to powers of two.
        dtype: Of the result.
    """
    how = (recipe.grad.scaling, recipe.weight_for_dgrad.scaling, power_of_two)
    last = (None, None, "", dtype, None, None, None, True)
    dz: Tensor = scaled.linear(*q, weight, None, *how, *last)
    return dz


def call(
    spec: Spec, t: Operands, recipe: str, owners: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Compute a call of the family with its Linear layers in FP8.

    Args:
        spec: What to compute.
        t: The tensors.
        recipe: One of RECIPES.
        owners: Parameters whose `main_grad` gets the gradient of their weight, or None for each.

    Raises:
        ValueError: If the recipe is not known.
        RuntimeError: If the device has no FP8, sizes are no multiples of 16, or rows are to be
            batch invariant.
    """
    how = recipes.find(recipe)
    if spec.batch_invariant:
        raise RuntimeError("batch_invariant() has no FP8 products")
    weights = [*t.weights, *([] if t.out_weight is None else [t.out_weight])]
    is_cast = dtype_of_products(t.x) is not None
    for weight in t.weights:
        if t.x.shape[-1:] != weight.shape[-1:] or not (is_cast or t.x.dtype is weight.dtype):
            # In PyTorch's words.
            return composition.compute(spec, t)
    scaled.require_fp8(t.x, weights)
    for weight in weights:
        quantized.require_inference(weight, recipe, composition.flat(t))
    power_of_two = _scales_are_rounded(how, weights)
    if not is_cast and _is_fused(spec, t):
        return _inference(spec, t, how, power_of_two)
    if owners is not None:
        t = t._replace(weights=added(t.weights, owners))

    def multiply(
        z: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        return _multiplied(z, weights, biases, recipe, power_of_two)

    return composition.compute(spec, t, multiply)


def _is_fused(spec: Spec, t: Operands) -> bool:
    """Return whether a call needs no gradient, and is a norm and what the ops have after it."""
    tensors = [v for v in composition.flat(t) if v is not None]
    follows = torch.is_grad_enabled() and any(v.requires_grad for v in tensors)
    return (
        not follows
        and first(t, "groups", "statistics") is None
        and not spec.returns_norm
        and fits(spec, t)
    )


def _inference(spec: Spec, t: Operands, recipe: Recipe, power_of_two: bool) -> list[Tensor]:
    """Compute a call by a norm that quantizes its rows, and products with all that follows."""
    x = t.x
    norm = (spec.normalization, spec.eps, spec.weight_offset, recipe.input.scaling, power_of_two)
    total, *q = scaled.norm(x, t.residual, t.gamma, t.beta, *norm)
    how = (recipe.input.scaling, recipe.weight.scaling, power_of_two)
    rows = x.shape[:-1]
    layers = list(zip(map(quantized.parts, t.weights), t.biases, strict=True))
    is_one = not spec.is_joined or len(layers) == 1
    if _is_gate_of_two(spec, t):
        (gate, bias), (up, up_bias) = layers
        last = (bias, None, spec.activation, x.dtype, *up, up_bias)
        products = [scaled.linear(*q, *gate, *how, *last)]
    else:
        if is_one and spec.activation:
            products = [
                scaled.linear(*q, *w, *how, bias, None, spec.activation, x.dtype)
                for w, bias in layers
            ]
        else:
            products = _products(q, t.weights, t.biases, recipe, power_of_two, x.dtype)
        if not is_one:
            products = [composition.activated(spec.activation, torch.cat(products, -1))]
    if t.out_weight is not None:
        q = quantize(products[0], recipe.input, power_of_two)
        residual = t.out_residual
        if residual is not None:
            residual = residual.reshape(-1, residual.shape[-1]).contiguous()
        out = quantized.parts(t.out_weight)
        products = [scaled.linear(*q, *out, *how, t.out_bias, residual, "", x.dtype)]
    outputs = [_in_shape(y, rows) for y in products]
    return [*outputs, total] if spec.returns_sum and has_sum(t) else outputs


def _is_gate_of_two(spec: Spec, t: Operands) -> bool:
    """Return whether one of two layers of the same size gates the other."""
    return (
        is_gate(spec.activation)
        and len(t.weights) == 2
        and t.weights[0].shape == t.weights[1].shape
        and (t.biases[0] is None) == (t.biases[1] is None)
    )


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, recipe: str) -> Tensor:
    """Return x W^T + b in FP8: a Linear layer without a norm.

    Args:
        x: Of shape `[..., K]`.
        weight: Of shape `[N, K]`.
        bias: Of shape `[N]`, or None.
        recipe: One of RECIPES.

    Raises:
        RuntimeError: As in `call`.
    """
    how = recipes.find(recipe)
    scaled.require_fp8(x, [weight])
    quantized.require_inference(weight, recipe, [x, bias])
    power_of_two = _scales_are_rounded(how, [weight])
    return _multiplied(x, [weight], [bias], recipe, power_of_two)[0]


def _multiplied(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: str,
    power_of_two: bool,
) -> list[Tensor]:
    dtype = dtype_of_products(z)
    if dtype is not None:
        # As kernels need it: norms give float32 there.
        z = cast(dtype, z)[0]
    pairs = [
        (w, b) if quantized.is_quantized(w) else _as_in_linear(z, w, b, dtype)
        for w, b in zip(weights, biases, strict=True)
    ]
    ws, bs = [w for w, _ in pairs], [b for _, b in pairs]
    if any(quantized.is_quantized(w) for w in ws):
        # Which have no gradients.
        return linears(z, ws, bs, recipes.find(recipe), power_of_two)
    return list(ScaledLinears.apply(z, recipe, power_of_two, *ws, *bs))


def _as_in_linear(
    z: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias as `F.linear` multiplies and adds them.

    Args:
        z: Of shape `[..., K]`.
        weight: Should be of shape `[N, K]`.
        bias: Should be None, or broadcast against `[N]`.
        dtype: That of autocast, or None.

    Raises:
        RuntimeError: As `F.linear`, if shapes or dtypes disagree.
    """
    if dtype is not None:
        weight, bias = cast(dtype, weight, bias)
    elif not all(v is None or v.dtype is z.dtype for v in (weight, bias)):
        F.linear(z, weight, bias)
    if z.shape[-1] != weight.shape[-1]:
        F.linear(z, weight, bias)
    return weight, None if bias is None else bias.expand(weight.shape[0])


def _scales_are_rounded(recipe: Recipe, weights: Sequence[Tensor]) -> bool:
    """Return whether scales are rounded up to powers of two: where such weights train."""
    trains = any(w.requires_grad for w in weights)
    return recipe.power_of_two and trains and not _are_frozen(weights)


def _are_frozen(weights: Sequence[Tensor]) -> bool:
    """Return whether weights are frozen for good: those of a context may train meanwhile."""
    if torch.compiler.is_compiling():
        return False
    found = frozen.find(weights, meets=False)
    return found is not None and not found[0].trains
