"""One scale for all hidden rows of an MLP in FP8, from a bound given by its frozen parameters.

A norm returns rows n with |n| <= sqrt(K), for any x. With the norm's g = gamma + offset, and w
one row of the first layer's weight in 8 bits,

    |w . q(n g + beta) + b| <= |w g| sqrt(K) + |w . beta + b| + what rounding q adds

and no activation here is larger than its argument. A gate multiplies two of these. For any n,

    |w . n| |v . n| <= K (|w| |v| + |w . v|) / 2

which is about half of the product of the bounds, if w and v are nearly orthogonal.

A scale for which the largest of these bounds fits is known before any row is, so that a product can
store its rows in 8 bits. It costs little precision: e4m3 has the same three bits of mantissa over a
range of 2^15, of which a bound leaves some 2^6 unused, and that of a gate some K / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.activations import is_gate
from fused_norm.call import contexts
from fused_norm.ops.eight_bits import kept_in_8_bits
from fused_norm.recipes import E4M3, Cast, Recipe

# With fewer rows, a pass quantizes them, each with its own scale: one row of tiles keeps few SMs
# busy (docs/hopper-log.md, "Hidden rows that stay in 8 bits").
FEWEST_ROWS = 129
# The most that the type's largest number may represent, in standard deviations of a typical hidden
# feature. Normal numbers span 2^-6 to 448, a ratio of 2^14.8: such a feature loses nothing yet.
MOST = 2.0**11
# The same where a gate's standard deviation is taken to be the product of its factors'. At K = 4096
# their bound is 2^11.4 of that before it is rounded up. Hidden rows lose 0.45 dB of 31.5 at most.
MOST_GATED = 2.0**12.5
# The largest relative change from rounding to bfloat16 and then to e4m3.
_ROUNDING = 2.0**-4 + 2.0**-7
# What tensor cores' sums, the activation and its rounding to bfloat16 add to a bound.
_SLACK = 1 + 2.0**-4
# Rows of a weight that are widened at once.
_TOGETHER = 1024


class _Layer(NamedTuple):
    """A layer in 8 bits `[N, K]`, its scales `[N, 1]` or one, and its bias `[N]` or None."""

    q: Tensor
    own: Tensor
    bias: Tensor | None

    def part(self, first: int, last: int) -> _Layer:
        own = self.own if self.own.numel() == 1 else self.own[first:last]
        bias = None if self.bias is None else self.bias[first:last]
        return _Layer(self.q[first:last], own, bias)


class _Norm(NamedTuple):
    """What a norm multiplies its rows by, and adds, `[K]`."""

    g: Tensor
    beta: Tensor


class _Outputs(NamedTuple):
    """Of a layer's outputs: the weight times g, its size, and what bounds the rest of each."""

    weight: Tensor
    size: Tensor
    rest: Tensor


def has_bound(recipe: Recipe, activation: str, eps: float) -> bool:
    """Return whether an MLP's hidden rows have a bound, if its parameters are frozen.

    Args:
        recipe: The MLP's.
        activation: One of ACTIVATIONS, or `""` for none.
        eps: The norm's.
    """
    return recipe.input.scaling in ("row", "tensor") and bool(activation) and eps >= 0


def hidden_scale(
    rows: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    weight_offset: float,
    weight_scaling: str,
    power_of_two: bool,
) -> float:
    """Return the scale of hidden rows, a power of two; 0.0 if each row needs its own.

    That is the case for few rows, for parameters that are not all frozen for good, for bounds too
    far from typical values, and if a CUDA graph captures the first call.

    Args:
        rows: The number of rows.
        gamma: Weight of the norm `[K]`, or None.
        beta: Its bias `[K]`, or None.
        weights: The first layer's, `[N, K]`, as it was frozen; of a gate one `[2N, K]`, or two.
        biases: For each weight its bias, or None.
        activation: One of ACTIVATIONS.
        weight_offset: Added to gamma, if there is one.
        weight_scaling: Which elements share a scale of a weight in 8 bits.
        power_of_two: Whether those scales are rounded up to powers of two.
    """
    if rows < FEWEST_ROWS:
        return 0.0
    found = contexts.find((gamma, beta, *weights, *biases), meets=False)
    # A context freezes from the second call on: bits would change within it.
    if found is None or found[0].trains:
        return 0.0
    cast = Cast(E4M3, weight_scaling)
    kept = [kept_in_8_bits(weight, cast, power_of_two)[0] for weight in weights]
    made = tuple(each for each in kept if each is not None)
    if len(made) < len(weights):
        return 0.0
    record, keys = found
    name = ("hidden scale", is_gate(activation), weight_offset, weight_scaling, power_of_two)

    def find() -> float:
        layers = list[_Layer]()
        for each, bias in zip(made, biases, strict=True):
            q, own = each.tensors
            layers.append(_Layer(q, own, bias))
        if is_gate(activation) and len(layers) == 1:
            N = len(layers[0].q) // 2
            layers = [layers[0].part(0, N), layers[0].part(N, 2 * N)]
        return _scale(layers, gamma, beta, weight_offset)

    return record.found(name, keys, made, find) or 0.0


def _scale(
    layers: list[_Layer], gamma: Tensor | None, beta: Tensor | None, weight_offset: float
) -> float:
    """Return the scale of a layer's outputs, or of one's that gate another's; 0.0 if useless."""
    N, K = layers[0].q.shape
    kind: Any = {"dtype": torch.float32, "device": layers[0].q.device}
    g = torch.ones(K, **kind) if gamma is None else gamma.detach().float() + weight_offset
    norm = _Norm(g, torch.zeros(K, **kind) if beta is None else beta.detach().float())
    # The largest norm of rows whose elements have been rounded.
    reach = K**0.5 * (1 + _ROUNDING)
    bounds, sizes = list[Tensor](), list[Tensor]()
    for first in range(0, N, _TOGETHER):
        w, *gated = (_outputs(layer.part(first, first + _TOGETHER), norm) for layer in layers)
        bound, size = reach * w.size + w.rest, w.size
        for v in gated:
            size = w.size * v.size
            together = reach**2 * (size + (w.weight * v.weight).sum(-1).abs()) / 2
            bound = together + reach * (w.size * v.rest + v.size * w.rest) + w.rest * v.rest
        bounds.append(bound)
        sizes.append(size)
    scale = recipes.scale_of(torch.cat(bounds).amax() * _SLACK, E4M3, power_of_two=True)
    # For at least half of the features, or a few large ones would hide that the others are lost.
    limit = (MOST if len(layers) == 1 else MOST_GATED) * torch.cat(sizes).median()
    largest = scale * torch.finfo(E4M3).max
    # NaN compares as false.
    is_useful = largest.isfinite() & (largest <= limit)
    return float(torch.where(is_useful, scale, 0.0))


def _outputs(layer: _Layer, norm: _Norm) -> _Outputs:
    w = layer.q.float() * layer.own
    products = w * norm.beta
    fixed = products.sum(-1)
    if layer.bias is not None:
        fixed = fixed + layer.bias.detach().float()
    # Elements far below their row's largest are rounded to multiples of a fraction of that.
    most = w.shape[1] ** 0.5 * norm.g.abs().amax() + norm.beta.abs().amax()
    step = 2.0**-9 / torch.finfo(E4M3).max * most
    rounding = _ROUNDING * products.abs().sum(-1) + step * w.abs().sum(-1)
    weight = w * norm.g
    size = torch.linalg.vector_norm(weight, dim=-1)
    return _Outputs(weight, size, fixed.abs() + rounding)
