"""Powers of two of a gate's hidden columns in FP8, which its two layers take over.

For a = act(w . n + b) (v . n + c) and any powers of two f_j,

    y = sum_j W2_j a_j = sum_j (W2_j f_j) (a_j / f_j)

so the scales of v, and c, are divided by f, and W2's columns are multiplied by it before that
weight is quantized. All of this is exact but for the quantization. With f_j near the size of a_j,
hidden columns have similar bounds: one scale for all of them leaves none too few bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_norm.ops.eight_bits import IN_COLUMNS, quantize
from fused_norm.ops.hidden_scale import (
    TOGETHER,
    Columns,
    Kept,
    Layer,
    Parameters,
    are_few,
    bound_of,
)
from fused_norm.recipes import E4M3, Cast

# The most by which the second weight's quantization may become noisier, in power: 0.45 dB, as much
# as hidden rows may lose.
_MOST_NOISE = 10**0.045
# Noise that is as good as none, in parts of a row's energy: e4m3's own is 2^-10.5.
_NO_NOISE = 2.0**-20


class Folded(NamedTuple):
    """The layers of an MLP in 8 bits, of which the second has taken over its columns' factors.

    Attributes:
        layers: The first layer, or the two of a gate.
        q: The second layer's weight.
        scale: Its scales.
        one_scale: The scale of hidden rows; 0.0 if each has its own.
        are_kept: Whether earlier calls made the first layers.
        is_kept: Whether earlier calls made the second's weight.
    """

    layers: list[Layer]
    q: Tensor
    scale: Tensor
    one_scale: float
    are_kept: bool
    is_kept: bool


def folded(rows: int, of: Parameters, out_weight: Tensor, kept: Kept) -> Folded | None:
    """Return an MLP's layers where its hidden columns have factors.

    Few rows use the same layers, so that one version of the second weight is kept.

    Args:
        rows: The number of rows.
        of: The parameters that bound the hidden rows of a gate.
        out_weight: The second layer's weight `[K2, N]`.
        kept: What is kept of the parameters, frozen together with that weight.

    Returns:
        None if one scale serves without factors, if factors do not help or cost the second weight
        too much, and if a CUDA graph captures the first call.
    """
    # Another thread may not move the second weight's values meanwhile.
    with kept.record.offload.turn():
        return _folded(rows, of, out_weight, kept)


def _folded(rows: int, of: Parameters, out_weight: Tensor, kept: Kept) -> Folded | None:
    record, cast = kept.record, Cast(E4M3, of.weight_scaling)
    # Gates multiply what the last layer gives, or the last half of the only one.
    (last, own), bias = kept.made[-1].tensors, of.biases[-1]
    keys = record.offload.current(kept.keys)
    name = ("hidden columns", of.activation, of.weight_offset, *cast, of.power_of_two)

    def find() -> Columns | None:
        bound = bound_of(kept._replace(keys=keys[:-1]), of)
        columns = None if bound is None else bound.columns
        if (
            columns is None
            or columns.scale * torch.finfo(E4M3).max > torch.finfo(out_weight.dtype).max
        ):
            return None
        if bias is not None and not _is_exact(bias, columns):
            return None
        # Once they are away, only what has been made of the values can be used.
        is_away = record.offload.has_any_of(keys[-1:])
        if is_away or _is_precise(out_weight, columns, cast, of.power_of_two):
            return columns
        return None

    columns = record.found(name, keys, kept.made, find)
    if columns is None:
        return None
    new = list[str]()

    def make_out() -> tuple[Tensor, ...]:
        new.append("out")
        return tuple(quantize(_in_columns(out_weight, columns), cast, of.power_of_two))

    def make_last() -> tuple[Tensor, ...]:
        new.append("last")
        scales = own / columns.of_outputs(last)[:, None]
        return (scales,) if bias is None else (scales, _divided(bias, columns))

    by = (IN_COLUMNS, *cast, of.power_of_two, columns.content)
    out = record.prepared(by, keys[-1:], make_out, out_weight.device)
    if out is None:
        return None
    if (moved := record.offload.current(keys)) != keys:
        # A CUDA graph may capture the next call, and could not find this again.
        record.found(name, moved, kept.made, lambda: columns)
    changed = record.prepared(("in columns", columns), (), make_last, out_weight.device)
    # Another thread may have thawed it: then nothing would hold these for a CUDA graph.
    if changed is None or not record.is_alive:
        return None
    layers = [
        Layer(v.tensors[0], v.tensors[1], its) for v, its in zip(kept.made, of.biases, strict=True)
    ]
    layers[-1] = Layer(last, changed.tensors[0], None if bias is None else changed.tensors[1])
    one_scale = 0.0 if are_few(rows) else columns.scale
    are_kept = not kept.are_new and "last" not in new
    return Folded(layers, out.tensors[0], out.tensors[1], one_scale, are_kept, "out" not in new)


def _divided(bias: Tensor, columns: Columns) -> Tensor:
    return (bias.detach().double() / columns.of_outputs(bias)).to(bias.dtype)


def _is_exact(bias: Tensor, columns: Columns) -> bool:
    """Return whether a bias has the type's full precision when it is divided."""
    again = _divided(bias, columns).double() * columns.of_outputs(bias)
    return torch.equal(again, bias.detach().double())


def _in_columns(weight: Tensor, columns: Columns) -> Tensor:
    """Return a weight with its columns multiplied, in a type with the exponents of float32."""
    weight = weight.detach()
    if weight.dtype is not torch.bfloat16:
        weight = weight.float()
    return weight * columns.factors.to(weight.device, weight.dtype)


def _is_precise(weight: Tensor, columns: Columns, cast: Cast, power_of_two: bool) -> bool:
    """Return whether a weight keeps its precision in 8 bits, on average over its rows.

    Noise counts as the hidden features that it is multiplied by, but large ones count as typical
    ones: a gate may close them.
    """
    weight, factors = weight.detach(), columns.factors.to(weight.device)
    shares = columns.shares.to(weight.device)
    q, scale = quantize(weight, cast, power_of_two)
    changed, own = quantize(_in_columns(weight, columns), cast, power_of_two)
    ratios = list[Tensor]()
    for first in range(0, len(weight), TOGETHER):
        rows = slice(first, first + TOGETHER)
        exact = weight[rows].float()
        without = _part(q, scale, rows) - exact
        within = _part(changed, own, rows) / factors - exact
        energy, before, after = ((v.square() * shares).sum(-1) for v in (exact, without, within))
        # A row of zeros has no noise, and one of few different numbers may have none.
        ratio = after / before.maximum(energy * _NO_NOISE)
        ratios.append(torch.where(energy > 0, ratio, 1.0))
    # NaN compares as false.
    return bool(torch.cat(ratios).mean() <= _MOST_NOISE)


def _part(q: Tensor, scale: Tensor, rows: slice) -> Tensor:
    return q[rows].float() * (scale if scale.numel() == 1 else scale[rows])
