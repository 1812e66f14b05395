"""Linear layers in FP8 on the same rows, and their gradients: one op for each.

On Hopper in bfloat16, with scales for rows or for a tensor, the chain (chain/eight_bits_ops.h) has
kernels compute them; elsewhere PyTorch's ops do what `recipes.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.call import frozen
from fused_norm.call.memory import in_memory
from fused_norm.ops import quantized, scaled
from fused_norm.ops.eight_bits import in_8_bits, quantize
from fused_norm.ops.flops import count_flops
from fused_norm.ops.registration import define, unseen
from fused_norm.recipes import E4M3, E5M2, Cast, Recipe


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
        # A layer whose result is not used has no gradient.
        ctx.set_materialize_grads(False)
        return tuple(linears(z, weights, biases, recipes.find(recipe), power_of_two))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of z, the weights and the biases."""
        z, *weights = ctx.saved_tensors
        name, power_of_two = ctx.kind
        count, needed = len(weights), ctx.needs_input_grad
        has_dy = [dy is not None for dy in dys]
        found: list[Tensor | None] = [None] * (1 + 2 * count)
        wanted = [0] if needed[0] and any(has_dy) else []
        wanted += [i for i in range(1, 1 + 2 * count) if needed[2 + i] and has_dy[(i - 1) % count]]
        if wanted:
            gradients = _gradients(z, dys, weights, recipes.find(name), power_of_two, wanted)
            for place, gradient in zip(wanted, gradients, strict=True):
                found[place] = gradient
        return found[0], None, None, *found[1:]


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
    parts = list(map(quantized.parts, weights))
    given, scales, are_kept = [q for q, _ in parts], [scale for _, scale in parts], False
    scaling = recipe.weight.scaling
    if not torch.compiler.is_compiling():
        given, scales, are_kept = in_8_bits(given, scales, scaling, power_of_two)
    how = (recipe.input.scaling, scaling, power_of_two, weights[0].dtype, are_kept)
    found: list[Tensor] = _op(z, given, scales, [*biases], *how)
    return found


def _layers(
    z: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    scaling: str,
    weight_scaling: str,
    power_of_two: bool,
    dtype: torch.dtype,
    _: bool,
) -> list[Tensor]:
    if frozen.is_any() and any(own is None for own in weight_scales):
        made = in_8_bits(weights, weight_scales, weight_scaling, power_of_two)
        how = (scaling, weight_scaling, power_of_two, dtype, made[2])
        found: list[Tensor] = _op(z, *made[:2], [*biases], *how)
        return found
    layers = zip(weights, weight_scales, biases, strict=True)
    if not z.numel():
        return [z.new_empty((*z.shape[:-1], len(w)), dtype=dtype) for w, *_ in layers]
    q, scale = quantize(z.reshape(-1, z.shape[-1]), Cast(E4M3, scaling), power_of_two)
    kind = (scaling, weight_scaling, power_of_two)
    products = [scaled.multiply(q, scale, w, s, *kind, b, dtype).to(dtype) for w, s, b in layers]
    # No views: as results of `F.linear` they may be written.
    unsafe_view = torch.ops.aten._unsafe_view
    return [unsafe_view(y, [*z.shape[:-1], y.shape[-1]]) for y in products]


def _fake_layers(z: Tensor, weights: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [z.new_empty((*z.shape[:-1], len(weight)), dtype=rest[-2]) for weight in weights]


def _gradients(
    z: Tensor,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    recipe: Recipe,
    power_of_two: bool,
    wanted: list[int],
) -> list[Tensor]:
    """Return the gradients at the places that are wanted: of z, of each weight, of each bias."""
    given, are_kept = [*weights], False
    scales: list[Tensor | None] = [None] * len(weights)
    if not torch.compiler.is_compiling():
        dys = in_memory(dys)
        if wanted[0] == 0:
            given, scales, are_kept = in_8_bits(
                weights, scales, recipe.weight_for_dgrad.scaling, power_of_two, turned=True
            )
    how = (*_how(recipe), power_of_two, recipe.has_fp8_wgrad)
    found: list[Tensor] = _backward_op(z, [*dys], given, scales, *how, wanted, are_kept)
    return found


def _how(recipe: Recipe) -> tuple[str, bool, str, str]:
    grad = recipe.grad
    weight, rows = recipe.weight_for_dgrad.scaling, recipe.input.scaling
    return grad.scaling, grad.dtype is E5M2, weight, rows


def _layers_backward(
    z: Tensor,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor | None],
    grad_scaling: str,
    is_e5m2: bool,
    weight_scaling: str,
    scaling: str,
    power_of_two: bool,
    has_fp8_wgrad: bool,
    wanted: list[int],
    _: bool,
) -> list[Tensor]:
    of_weight = Cast(E4M3, weight_scaling)
    how = (grad_scaling, is_e5m2, weight_scaling, scaling, power_of_two, has_fp8_wgrad)
    if frozen.is_any() and 0 in wanted and any(own is None for own in weight_scales):
        made = in_8_bits(weights, weight_scales, weight_scaling, power_of_two, turned=True)
        again: list[Tensor] = _backward_op(z, [*dys], *made[:2], *how, wanted, made[2])
        return again
    count = len(weights)
    x, turned = z.reshape(-1, z.shape[-1]), list[Any]()
    found: dict[int, Tensor] = {}
    for i, (weight, own, dy) in enumerate(zip(weights, weight_scales, dys, strict=True)):
        if dy is None:
            continue
        if not dy.numel():
            sizes = (x.shape, (dy.shape[-1], x.shape[-1]), dy.shape[-1:])
            for place, size in zip((0, 1 + i, 1 + count + i), sizes, strict=True):
                found[place] = dy.new_zeros(size)
            continue
        rows = dy.reshape(-1, dy.shape[-1])
        wants_dz, wants_dw = 0 in wanted, 1 + i in wanted
        turns = wants_dw and has_fp8_wgrad
        q: Any = []
        if wants_dz or turns:
            cast = Cast(E5M2 if is_e5m2 else E4M3, grad_scaling)
            q = quantize(rows, cast, power_of_two, plain=wants_dz, turned=turns)
        if wants_dz:
            by: Any = (weight, own)
            if own is None:
                by = quantize(weight, of_weight, power_of_two, plain=False, turned=True)
            kind: Any = (grad_scaling, weight_scaling, power_of_two, None, dy.dtype)
            part = scaled.multiply(*q[:2], *by, *kind).to(dy.dtype)
            found[0] = found[0] + part if 0 in found else part
        if turns:
            of_rows = Cast(E4M3, scaling)
            turned = turned or quantize(x, of_rows, power_of_two, plain=False, turned=True)
            kind = (grad_scaling, scaling, power_of_two, None, dy.dtype)
            found[1 + i] = scaled.multiply(*q[-2:], *turned, *kind).to(dy.dtype)
        elif wants_dw:
            found[1 + i] = rows.t() @ x.to(dy.dtype)
        if 1 + count + i in wanted:
            found[1 + count + i] = rows.sum(0, dtype=torch.float32).to(dy.dtype)
    if 0 in found:
        found[0] = found[0].reshape(z.shape).to(z.dtype)
    return [found[place] for place in wanted]


def _fake_layers_backward(
    z: Tensor, dys: Sequence[Tensor | None], weights: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    count, found = len(weights), list[Tensor]()
    for place in rest[-2]:
        dy = None if place == 0 else dys[(place - 1) % count]
        if dy is None:
            found.append(z.new_empty(z.shape))
        else:
            size = (dy.shape[-1], z.shape[-1]) if place <= count else dy.shape[-1:]
            found.append(dy.new_empty(size))
    return found


_op = define(
    "fp8_layers(Tensor z, Tensor[] weights, Tensor?[] weight_scales, Tensor?[] biases, "
    "str scaling, str weight_scaling, bool power_of_two, ScalarType dtype, bool are_kept) "
    "-> Tensor[]",
    _fake_layers,
    unseen(_layers),
)
_backward_op = define(
    "fp8_layers_backward(Tensor z, Tensor?[] grad_outputs, Tensor[] weights, "
    "Tensor?[] weight_scales, str grad_scaling, bool is_e5m2, str weight_scaling, str scaling, "
    "bool power_of_two, bool has_fp8_wgrad, int[] wanted, bool are_kept) -> Tensor[]",
    _fake_layers_backward,
    unseen(_layers_backward),
)


def _backward_flops(z: Tensor, dys: Sequence[Tensor | None], weights: Any, *rest: Any) -> int:
    wanted, total = rest[-2], 0
    for i, dy in enumerate(dys):
        if dy is not None:
            total += 2 * dy.numel() * z.shape[-1] * ((0 in wanted) + (1 + i in wanted))
    return total


count_flops("fp8_layers", lambda z, weights, *rest: 2 * z.numel() * sum(len(w) for w in weights))
count_flops("fp8_layers_backward", _backward_flops)
