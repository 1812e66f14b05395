"""One scale for all hidden rows of an MLP in FP8, from a bound given by its frozen parameters.

A norm returns rows n with |n| <= sqrt(K), for any x. With the norm's g = gamma + offset, and w
one row of the first layer's weight in 8 bits,

    |w . q(n g + beta) + b| <= |w g| sqrt(K) + |w . beta + b| + what rounding q adds

and no activation here is larger than its argument. A scale for which the largest of these bounds
fits is known before any row is, so that a product can store its rows in 8 bits. It costs no
precision: e4m3 has the same three bits of mantissa over a range of 2^15, of which a bound leaves
some 2^6 unused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.activations import PLAIN
from fused_norm.call import contexts
from fused_norm.ops.eight_bits import kept_in_8_bits
from fused_norm.recipes import E4M3, Cast, Recipe

# With fewer rows, a pass quantizes them, each with its own scale: one row of tiles keeps few SMs
# busy (docs/hopper-log.md, "Hidden rows that stay in 8 bits").
FEWEST_ROWS = 129
# The most that the type's largest number may represent, in standard deviations of a typical hidden
# feature. Normal numbers span 2^-6 to 448, a ratio of 2^14.8: such a feature loses nothing yet.
MOST = 2.0**11
# The largest relative change from rounding to bfloat16 and then to e4m3.
_ROUNDING = 2.0**-4 + 2.0**-7
# What tensor cores' sums, the activation and its rounding to bfloat16 add to a bound.
_SLACK = 1 + 2.0**-4
# Rows of a weight that are widened at once.
_TOGETHER = 1024


def has_bound(recipe: Recipe, activation: str, eps: float) -> bool:
    """Return whether an MLP's hidden rows have a bound, if its parameters are frozen.

    Args:
        recipe: The MLP's.
        activation: One of ACTIVATIONS, or `""` for none: the bound of a gate is useless.
        eps: The norm's.
    """
    return recipe.input.scaling in ("row", "tensor") and activation in PLAIN and eps >= 0


def hidden_scale(
    rows: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
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
        weight: The first layer's, `[N, K]`, as it was frozen.
        bias: Its bias `[N]`, or None.
        weight_offset: Added to gamma, if there is one.
        weight_scaling: Which elements share a scale of the weight in 8 bits.
        power_of_two: Whether those scales are rounded up to powers of two.
    """
    if rows < FEWEST_ROWS:
        return 0.0
    found = contexts.find((gamma, beta, weight, bias), meets=False)
    # A context freezes from the second call on: bits would change within it.
    if found is None or found[0].trains:
        return 0.0
    kept, _ = kept_in_8_bits(weight, Cast(E4M3, weight_scaling), power_of_two)
    if kept is None:
        return 0.0
    record, keys = found
    name = ("hidden scale", weight_offset, weight_scaling, power_of_two)

    q, own = kept.tensors

    def find() -> float:
        return _scale(q, own, gamma, beta, bias, weight_offset)

    return record.found(name, keys, kept, find) or 0.0


def _scale(
    q: Tensor,
    own: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
) -> float:
    """Return the scale of an 8-bit weight's outputs; 0.0 if it is of no use."""
    N, K = q.shape
    kind: Any = {"dtype": torch.float32, "device": q.device}
    g = torch.ones(K, **kind) if gamma is None else gamma.detach().float() + weight_offset
    offset = torch.zeros(K, **kind) if beta is None else beta.detach().float()
    b = torch.zeros(N, **kind) if bias is None else bias.detach().float()
    root = K**0.5
    # Elements far below their row's largest are rounded to multiples of a fraction of that.
    step = 2.0**-9 / torch.finfo(E4M3).max * (root * g.abs().amax() + offset.abs().amax())
    bounds, sizes = list[Tensor](), list[Tensor]()
    for first in range(0, N, _TOGETHER):
        part = slice(first, first + _TOGETHER)
        w = q[part].float() * (own if own.numel() == 1 else own[part])
        size = torch.linalg.vector_norm(w * g, dim=-1)
        products = w * offset
        fixed = (products.sum(-1) + b[part]).abs()
        rounding = _ROUNDING * (root * size + products.abs().sum(-1)) + step * w.abs().sum(-1)
        bounds.append(root * size + fixed + rounding)
        sizes.append(size)
    bound = torch.cat(bounds).amax() * _SLACK
    scale = recipes.scale_of(bound, E4M3, power_of_two=True)
    # For at least half of the features, or a few large ones would hide that the others are lost.
    limit = MOST * torch.cat(sizes).median()
    largest = scale * torch.finfo(E4M3).max
    # NaN compares as false.
    is_useful = largest.isfinite() & (largest <= limit)
    return float(torch.where(is_useful, scale, 0.0))
