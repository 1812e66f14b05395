"""FP8 Linear layers on the same rows and their gradients: one op for each.

On Hopper in bfloat16, with scales for rows or for a tensor, the chain (chain/eight_bits_ops.h) runs
kernels; elsewhere PyTorch's ops do what `recipes.py` specifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.activations import activated, activation_gradient, is_gate
from fused_norm.call import contexts, frozen
from fused_norm.ops import scaled
from fused_norm.ops.eight_bits import MULTIPLE, in_8_bits, in_both_layouts, quantize, scales_of
from fused_norm.ops.flops import count_flops
from fused_norm.ops.registration import define, unseen
from fused_norm.recipes import E4M3, E5M2, Cast


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
    activation: str,
    keeps_h: bool,
    keeps_rows: bool,
    keeps_weights: bool,
    residual: Tensor | None = None,
    maxima: Tensor | None = None,
    leaves_maxima: bool = False,
    z_scale: Tensor | None = None,
) -> list[Tensor]:
    if frozen.is_any() and any(own is None for own in weight_scales):
        by, are_kept = (weights, weight_scales, weight_scaling, power_of_two), False
        is_new = keeps_weights and not contexts.may_hold(weights)
        if is_new:
            given, scales, qs, own = in_both_layouts(weights, weight_scaling, power_of_two)
        else:
            given, scales, are_kept = in_8_bits(*by)
        how = (scaling, weight_scaling, power_of_two, dtype, are_kept)
        keeps = (keeps_h, keeps_rows, False)
        operands = (z, given, scales, [*biases])
        last = (residual, maxima, leaves_maxima, z_scale)
        found: list[Tensor] = layers(*operands, *how, activation, *keeps, *last)
        left = [found.pop()] if leaves_maxima else []
        if keeps_weights and not is_new:
            # Results of an op may not share memory.
            kept: Any = in_8_bits(*by, transposed=True)
            qs, own = ([v.clone() for v in each] for each in kept[:2])
        if keeps_weights:
            for q, scale in zip(qs, own, strict=True):
                found += spread_scales(q, scale, weight_scaling)
        return [*found, *left]
    if not z.numel():
        rest: list[Any] = [scaling, weight_scaling, power_of_two, dtype, False, activation]
        rest += [keeps_h, keeps_rows, keeps_weights, residual, maxima, leaves_maxima]
        return _fake_layers(z, weights, weight_scales, biases, *rest)
    x = z.reshape(-1, z.shape[-1])
    if z_scale is None:
        q, scale, *rows = quantize(x, Cast(E4M3, scaling), power_of_two, transposed=keeps_rows)
    else:
        q, scale, rows = x, z_scale, []
    if rows:
        rows = spread_scales(rows[0], rows[1], scaling)
    kind, cast = (scaling, weight_scaling, power_of_two), Cast(E4M3, weight_scaling)
    # Not views: like `F.linear`'s, results may be written.
    unsafe_view = torch.ops.aten._unsafe_view
    ys, transposed = list[Tensor](), list[Tensor]()
    for w, s, b in zip(weights, weight_scales, biases, strict=True):
        by_layout: list[Any] = [w, s]
        if s is None:
            by_layout = [*quantize(w, cast, power_of_two, transposed=keeps_weights)]
        ys.append(scaled.multiply(q, scale, by_layout[0], by_layout[1], *kind, b, dtype))
        if residual is not None:
            ys[-1] = ys[-1] + residual.reshape(ys[-1].shape)
        if keeps_weights:
            transposed += spread_scales(by_layout[2], by_layout[3], weight_scaling)
    saved = list[Tensor]()
    if activation:
        h = ys[0] if len(ys) == 1 else torch.cat(ys, -1)
        ys = [activated(activation, h)]
        saved = [h.to(dtype)] * keeps_h
    ys = [unsafe_view(y.to(dtype), [*z.shape[:-1], y.shape[-1]]) for y in ys]
    left = [maxima_of(ys[0].flatten(0, -2), scaling)] * leaves_maxima
    return [*ys, *saved, *rows, *transposed, *left]


def maxima_of(v: Tensor, scaling: str) -> Tensor:
    """Return the largest magnitudes of a matrix in bfloat16, as kernels take them.

    Args:
        v: Of shape `[M, N]`.
        scaling: Which elements share a scale: `"row"`, for maxima of columns as well, or
            `"tensor"`.

    Returns:
        The bits of those of the columns, then of the rows, or of the only one, as 32-bit numbers,
        then zeros, in a vector in bfloat16 of `maxima_count` elements.
    """
    sizes, (M, N) = v.abs(), v.shape
    found = (
        sizes.amax().reshape(1)
        if scaling == "tensor"
        else torch.cat([sizes.amax(0), sizes.amax(1)])
    )
    bits = found.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    padded = bits.new_zeros(maxima_count(M, N, scaling) // 2)
    padded[: len(bits)] = bits
    return padded.view(torch.bfloat16)


def maxima_count(M: int, N: int, scaling: str) -> int:
    """Return the elements of what `maxima_of` returns: two for each maximum, eight for four.

    Args:
        M: Rows.
        N: Columns.
        scaling: As for `maxima_of`.
    """
    count = 1 if scaling == "tensor" else M + N
    return 2 * ((count + 3) // 4 * 4)


def spread_scales(q: Tensor, scale: Tensor, scaling: str) -> list[Tensor]:
    """Return a matrix and a scale for each row, in the kernels' format, even if all share one.

    Args:
        q: In 8 bits, of shape `[M, K]`.
        scale: Its scales.
        scaling: Which elements share a scale.
    """
    return [q, scale.repeat(len(q), 1) if scaling == "tensor" else scale]


def _fake_layers(
    z: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Any,
    biases: Any,
    scaling: str,
    weight_scaling: str,
    power_of_two: bool,
    dtype: torch.dtype,
    are_kept: bool,
    activation: str,
    keeps_h: bool,
    keeps_rows: bool,
    keeps_weights: bool,
    residual: Tensor | None = None,
    maxima: Tensor | None = None,
    leaves_maxima: bool = False,
    z_scale: Tensor | None = None,
) -> list[Tensor]:
    K = z.shape[-1]
    M = z.numel() // max(K, 1)
    sizes = [len(weight) for weight in weights]
    N = sum(sizes)
    if activation:
        sizes = [N // 2 if is_gate(activation) else N]
    found = [z.new_empty((*z.shape[:-1], size), dtype=dtype) for size in sizes]
    found += [z.new_empty((M, N), dtype=dtype)] * keeps_h
    transposed = [(M, K, scaling)] * keeps_rows
    transposed += [(len(weight), K, weight_scaling) for weight in weights] * keeps_weights
    for rows, columns, kind in transposed:
        shape = columns, (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE
        found.append(z.new_empty(shape, dtype=E4M3))
        scales = scales_of(shape, "row" if kind == "tensor" else kind)
        found.append(z.new_empty(scales, dtype=torch.float32))
    if leaves_maxima:
        count = maxima_count(M, sizes[0], scaling)
        found.append(z.new_empty((count,), dtype=torch.bfloat16))
    return found


def _layers_backward(
    z: Tensor,
    z_scale: Tensor | None,
    h: Tensor | None,
    activation: str,
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
    dys = _whole(dys, weights, weight_scales, h)
    of_weight = Cast(E4M3, weight_scaling)
    how = (grad_scaling, is_e5m2, weight_scaling, scaling, power_of_two, has_fp8_wgrad)
    if frozen.is_any() and 0 in wanted and any(own is None for own in weight_scales):
        made = in_8_bits(weights, weight_scales, weight_scaling, power_of_two, transposed=True)
        again: list[Tensor] = layers_backward(
            z, z_scale, h, activation, [*dys], *made[:2], *how, wanted, made[2]
        )
        return again
    count = len(weights)
    if h is not None:
        dys = _before_activation(h, activation, dys[0], count)
    K = features(z, z_scale)
    x: Any = None if z_scale is not None else z.reshape(-1, K)
    transposed: Any = None if z_scale is None else (z, z_scale)
    found: dict[int, Tensor] = {}
    for i, (weight, own, dy) in enumerate(zip(weights, weight_scales, dys, strict=True)):
        if dy is None:
            continue
        if not dy.numel():
            sizes = ((*dy.shape[:-1], K), (dy.shape[-1], K), dy.shape[-1:])
            for place, size in zip((0, 1 + i, 1 + count + i), sizes, strict=True):
                found[place] = dy.new_zeros(size)
            continue
        rows = dy.reshape(-1, dy.shape[-1])
        wants_dz, wants_dw = 0 in wanted, 1 + i in wanted
        transposes = wants_dw and has_fp8_wgrad
        q: Any = []
        if wants_dz or transposes:
            cast = Cast(E5M2 if is_e5m2 else E4M3, grad_scaling)
            q = quantize(rows, cast, power_of_two, plain=wants_dz, transposed=transposes)
        if wants_dz:
            by: Any = (weight, own)
            if own is None:
                by = quantize(weight, of_weight, power_of_two, plain=False, transposed=True)
            kind: Any = (grad_scaling, weight_scaling, power_of_two, None, dy.dtype)
            part = scaled.multiply(*q[:2], *by, *kind).reshape(*dy.shape[:-1], K)
            # Kernels add the gradients of the layers before, and round both together.
            found[0] = (found[0] + part if 0 in found else part).to(dy.dtype)
        if transposes:
            of_rows = Cast(E4M3, scaling)
            transposed = transposed or quantize(
                x, of_rows, power_of_two, plain=False, transposed=True
            )
            kind = (grad_scaling, scaling, power_of_two, None, dy.dtype)
            found[1 + i] = scaled.multiply(*q[-2:], *transposed, *kind).to(dy.dtype)
        elif wants_dw:
            found[1 + i] = rows.t() @ x.to(dy.dtype)
        if 1 + count + i in wanted:
            found[1 + count + i] = rows.sum(0, dtype=torch.float32).to(dy.dtype)
    return [found[place] for place in wanted]


def _whole(
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor | None],
    h: Tensor | None,
) -> Sequence[Tensor | None]:
    """Return the gradients of layers' results, where those of parts of one may be given.

    Raises:
        RuntimeError: If parts are not those of one result.
    """
    if h is not None or len(dys) == len(weights):
        return dys
    parts = [dy for dy in dys if dy is not None]
    outputs = weights[0].shape[0 if weight_scales[0] is None else 1]
    if len(weights) > 1 or len(parts) < len(dys) or sum(p.shape[-1] for p in parts) != outputs:
        sizes = [None if dy is None else dy.shape[-1] for dy in dys]
        raise RuntimeError(f"expected gradients of parts of {outputs} outputs, got {sizes}")
    return [torch.cat(parts, -1)]


def _before_activation(
    h: Tensor, activation: str, da: Tensor | None, count: int
) -> Sequence[Tensor | None]:
    """Return the gradient of each layer's product."""
    if da is None:
        return [None] * count
    rows = da.reshape(-1, da.shape[-1])
    dh = activation_gradient(activation, rows, h)
    return [part.reshape(*da.shape[:-1], part.shape[-1]) for part in dh.chunk(count, -1)]


def features(z: Tensor, z_scale: Tensor | None) -> Any:
    """Return the size of a row of z, or of what it is the transpose of, if it has scales."""
    return z.shape[-1] if z_scale is None else z.shape[0]


def fake_layers_backward(
    z: Tensor,
    z_scale: Tensor | None,
    h: Tensor | None,
    activation: str,
    dys: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    """Return fake results of `layers_backward`, from its arguments."""
    K, count, found = features(z, z_scale), len(weights), list[Tensor]()
    first, sizes = next(dy for dy in dys if dy is not None), _outputs(h, dys, count)
    for place in rest[-2]:
        N = sizes[(place - 1) % count]
        size = (*first.shape[:-1], K) if place == 0 else (N, K) if place <= count else (N,)
        found.append(first.new_empty(size))
    return found


def _outputs(h: Tensor | None, dys: Sequence[Tensor | None], count: int) -> list[Any]:
    """Return the outputs of each layer, None for one without a gradient."""
    if h is not None:
        return [None if dys[0] is None else h.shape[-1] // count] * count
    if len(dys) > count:
        # Those of parts of one layer's result.
        return [sum(dy.shape[-1] for dy in dys if dy is not None)]
    return [None if dy is None else dy.shape[-1] for dy in dys]


layers = define(
    "fp8_layers(Tensor z, Tensor[] weights, Tensor?[] weight_scales, Tensor?[] biases, "
    "str scaling, str weight_scaling, bool power_of_two, ScalarType dtype, bool are_kept, "
    "str activation, bool keeps_h, bool keeps_rows, bool keeps_weights, Tensor? residual=None, "
    "Tensor? maxima=None, bool leaves_maxima=False, Tensor? z_scale=None) -> Tensor[]",
    _fake_layers,
    unseen(_layers),
)
layers_backward = define(
    "fp8_layers_backward(Tensor z, Tensor? z_scale, Tensor? h, str activation, "
    "Tensor?[] grad_outputs, Tensor[] weights, Tensor?[] weight_scales, str grad_scaling, "
    "bool is_e5m2, str weight_scaling, str scaling, bool power_of_two, "
    "bool has_fp8_wgrad, int[] wanted, bool are_kept) -> Tensor[]",
    fake_layers_backward,
    unseen(_layers_backward),
)


def backward_flops(z: Tensor, z_scale: Any, h: Any, _: str, dys: Any, *rest: Any) -> int:
    """Return the operations of the products of `layers_backward`, from its arguments."""
    K, weights, wanted = features(z, z_scale), rest[0], rest[-2]
    M = next(dy.numel() // dy.shape[-1] for dy in dys if dy is not None)
    sizes = enumerate(_outputs(h, dys, len(weights)))
    of_rows = [N * ((0 in wanted) + (1 + i in wanted)) for i, N in sizes if N is not None]
    return int(2 * M * K * sum(of_rows))


count_flops("fp8_layers", lambda z, weights, *rest: 2 * z.numel() * sum(len(w) for w in weights))
count_flops("fp8_layers_backward", backward_flops)
