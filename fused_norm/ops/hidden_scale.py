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

Where that is too much for a gate, because columns differ in size, each column may get a power of
two of its own (ops/hidden_columns.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import recipes
from fused_norm.activations import is_gate
from fused_norm.call import contexts
from fused_norm.call.frozen import Frozen
from fused_norm.call.offload import Keys
from fused_norm.call.prepared import Prepared
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
# The most that one of a gate's hidden columns may hold of the energy of all, for columns to have
# factors. A row's own scale makes its largest number exact: that is worth up to 0.8 of 24 dB.
_MOST_OF_ONE = 0.25
# The largest relative change from rounding to bfloat16 and then to e4m3.
_ROUNDING = 2.0**-4 + 2.0**-7
# What tensor cores' sums, the activation and its rounding to bfloat16 add to a bound.
_SLACK = 1 + 2.0**-4
# Rows of a weight that are widened at once.
TOGETHER = 1024
# The least factor of a column: one that small is lost among the others anyway.
_LEAST_FACTOR = 2.0**-32


class Parameters(NamedTuple):
    """What bounds hidden rows.

    Attributes:
        gamma: Weight of the norm `[K]`, or None.
        beta: Its bias `[K]`, or None.
        weights: The first layer's, `[N, K]`, as it was frozen; of a gate one `[2N, K]`, or two.
        biases: For each weight its bias, or None.
        activation: One of ACTIVATIONS.
        weight_offset: Added to gamma, if there is one.
        weight_scaling: Which elements share a scale of a weight in 8 bits.
        power_of_two: Whether those scales are rounded up to powers of two.
    """

    gamma: Tensor | None
    beta: Tensor | None
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    activation: str
    weight_offset: float
    weight_scaling: str
    power_of_two: bool


class Kept(NamedTuple):
    """What froze parameters for good, their keys, the weights in 8 bits, and which are new."""

    record: Frozen
    keys: Keys
    made: tuple[Prepared, ...]
    are_new: bool

    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool]:
        """Return one or two weights in 8 bits with their scales, and whether none is new."""
        q, scale = self.made[0].tensors
        if len(self.made) == 1:
            return q, scale, None, None, not self.are_new
        up, up_scale = self.made[1].tensors
        return q, scale, up, up_scale, not self.are_new


@dataclass(frozen=True, eq=False)
class Columns:
    """Powers of two of a gate's hidden columns, each divided by which they have one scale.

    All of it is in the host's memory.

    Attributes:
        factors: In float32, `[N]`.
        shares: The sizes of typical features, squared, in units of the middle one and at most 1.
        scale: The scale, a power of two.
    """

    factors: Tensor
    shares: Tensor
    scale: float

    @cached_property
    def content(self) -> bytes:
        """Return what tells factors from others."""
        return bytes(self.factors.view(torch.uint8).tolist())

    def of_outputs(self, like: Tensor) -> Tensor:
        """Return the factors of a layer's outputs: 1 for those before the hidden columns.

        Args:
            like: A tensor on the layer's device, with that many outputs.
        """
        return F.pad(self.factors, (len(like) - len(self.factors), 0), value=1.0).to(like.device)


class Bound(NamedTuple):
    """What the bound of hidden rows allows.

    Attributes:
        scale: The scale of all rows; 0.0 if that is too far from typical values.
        columns: In that case, for a gate, what columns allow, or None.
    """

    scale: float
    columns: Columns | None


class Layer(NamedTuple):
    """A layer in 8 bits `[N, K]`, its scales `[N, 1]` or one, and its bias `[N]` or None."""

    q: Tensor
    own: Tensor
    bias: Tensor | None

    def part(self, first: int, last: int) -> Layer:
        """Return the layer of some of the outputs."""
        own = self.own if self.own.numel() == 1 else self.own[first:last]
        bias = None if self.bias is None else self.bias[first:last]
        return Layer(self.q[first:last], own, bias)


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


def hidden_scale(rows: int, of: Parameters, kept: Kept | None = None) -> float:
    """Return the scale of hidden rows, a power of two; 0.0 if each row needs its own.

    That is the case for few rows, for parameters that are not all frozen for good, for bounds too
    far from typical values, and if a CUDA graph captures the first call.

    Args:
        rows: The number of rows.
        of: The parameters.
        kept: What is kept of them, if the caller knows.
    """
    if are_few(rows):
        return 0.0
    if kept is None:
        kept = kept_parameters(of)
    bound = None if kept is None else bound_of(kept, of)
    return 0.0 if bound is None else bound.scale


def are_few(rows: int) -> bool:
    """Return whether rows are too few for one scale to pay."""
    return rows < FEWEST_ROWS


def kept_parameters(of: Parameters, *others: Tensor) -> Kept | None:
    """Return what is kept of parameters.

    Args:
        of: The parameters.
        others: What else has to be frozen together with them; their keys come last.

    Returns:
        None if they are not all frozen together for good, or if nothing is kept for some weight.
    """
    found = contexts.find((of.gamma, of.beta, *of.weights, *of.biases, *others), meets=False)
    # A context freezes from the second call on: bits would change within it.
    if found is None or found[0].trains:
        return None
    cast = Cast(E4M3, of.weight_scaling)
    pairs = [kept_in_8_bits(weight, cast, of.power_of_two) for weight in of.weights]
    made = tuple(each for each, _ in pairs if each is not None)
    if len(made) < len(pairs):
        return None
    record, keys = found
    # Values may have left for what was made from them.
    keys = record.offload.current(keys)
    return Kept(record, keys, made, any(is_new for _, is_new in pairs))


def bound_of(kept: Kept, of: Parameters) -> Bound | None:
    """Return what the bound allows; None if a CUDA graph captures the first call.

    Args:
        kept: What is kept of the parameters, and only of these.
        of: The parameters.
    """
    how = (of.weight_offset, of.weight_scaling, of.power_of_two)
    name = ("hidden scale", is_gate(of.activation), *how)

    def find() -> Bound:
        layers = list[Layer]()
        for each, bias in zip(kept.made, of.biases, strict=True):
            q, own = each.tensors
            layers.append(Layer(q, own, bias))
        if is_gate(of.activation) and len(layers) == 1:
            N = len(layers[0].q) // 2
            layers = [layers[0].part(0, N), layers[0].part(N, 2 * N)]
        return _bound(layers, of.gamma, of.beta, of.weight_offset)

    return kept.record.found(name, kept.keys, kept.made, find)


def _bound(
    layers: list[Layer], gamma: Tensor | None, beta: Tensor | None, weight_offset: float
) -> Bound:
    """Return what the bound of a layer's outputs allows, or of one's that gate another's."""
    N, K = layers[0].q.shape
    kind: Any = {"dtype": torch.float32, "device": layers[0].q.device}
    g = torch.ones(K, **kind) if gamma is None else gamma.detach().float() + weight_offset
    norm = _Norm(g, torch.zeros(K, **kind) if beta is None else beta.detach().float())
    # The largest norm of rows whose elements have been rounded.
    reach = K**0.5 * (1 + _ROUNDING)
    bounds, sizes, energies = list[Tensor](), list[Tensor](), list[Tensor]()
    for first in range(0, N, TOGETHER):
        w, *gated = (_outputs(layer.part(first, first + TOGETHER), norm) for layer in layers)
        bound, size, energy = reach * w.size + w.rest, w.size, (w.size + w.rest).square()
        for v in gated:
            size, energy = w.size * v.size, energy * (v.size + v.rest).square()
            together = reach**2 * (size + (w.weight * v.weight).sum(-1).abs()) / 2
            bound = together + reach * (w.size * v.rest + v.size * w.rest) + w.rest * v.rest
        bounds.append(bound)
        sizes.append(size)
        energies.append(energy)
    bound, size = torch.cat(bounds) * _SLACK, torch.cat(sizes)
    is_one = len(layers) == 1
    scale = recipes.scale_of(bound.amax(), E4M3, power_of_two=True)
    useful = _if_useful(scale, size, MOST if is_one else MOST_GATED)
    if useful or is_one:
        return Bound(useful, None)
    # The power of two by which each column fits, and all columns in units of the middle one's.
    own = recipes.scale_of(bound, E4M3, power_of_two=True)
    scale = own.median()
    factors = torch.where(bound > 0, (own / scale).clamp_min(_LEAST_FACTOR), 1.0)
    energy = torch.cat(energies).double()
    useful = _if_useful(scale, size / factors, MOST_GATED)
    # NaN compares as false.
    if not useful or not bool(energy.amax() <= _MOST_OF_ONE * energy.sum()):
        return Bound(0.0, None)
    shares = (size / size.median()).clamp_max(1).square()
    return Bound(0.0, Columns(factors.cpu(), shares.cpu(), useful))


def _if_useful(scale: Tensor, size: Tensor, most: float) -> float:
    """Return a scale, or 0.0 if it is too far from the sizes of typical features."""
    # For at least half of the features, or a few large ones would hide that the others are lost.
    largest = scale * torch.finfo(E4M3).max
    # NaN compares as false.
    is_useful = largest.isfinite() & (largest <= most * size.median())
    return float(torch.where(is_useful, scale, 0.0))


def _outputs(layer: Layer, norm: _Norm) -> _Outputs:
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
