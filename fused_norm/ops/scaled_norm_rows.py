"""A norm whose rows become FP8 in both layouts: for products, and for gradients of their weights.

On Hopper in bfloat16, with scales for rows or for a tensor, the chain (chain/eight_bits_norm.h)
runs kernels that never write the rows in 16 bits; elsewhere PyTorch's ops do what `recipes.py`
specifies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm import composition
from fused_norm.composition import Operands, Spec
from fused_norm.norms import NORMS
from fused_norm.ops.eight_bits import MULTIPLE, quantize
from fused_norm.ops.registration import define, unseen
from fused_norm.ops.scaled_layers import spread_scales
from fused_norm.recipes import E4M3, Cast
from fused_norm.reference import widened

# A kernel has rows in registers; chain/eight_bits.h has the same limit.
LONGEST = 16384


def _norm_rows(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    weight_offset: float,
    scaling: str,
    power_of_two: bool,
) -> list[Tensor]:
    if not x.numel():
        how = (normalization, eps, weight_offset, scaling, power_of_two)
        return _fake_norm_rows(x, gamma, beta, *how)
    spec = Spec(normalization, eps=eps, weight_offset=weight_offset)
    z = composition.normalized(spec, x, Operands(x, None, gamma, beta)).reshape(-1, x.shape[-1])
    q, scale, qt, qt_scale = quantize(z, Cast(E4M3, scaling), power_of_two, transposed=True)
    mean, rstd = NORMS[normalization].statistics(widened(x), eps)
    found = [*spread_scales(q, scale, scaling), *spread_scales(qt, qt_scale, scaling)]
    found[0] = found[0].view(x.shape)
    found.append(rstd.unsqueeze(-1))
    return found if mean is None else [*found, mean.unsqueeze(-1)]


def _fake_norm_rows(x: Tensor, _: Any, beta: Any, normalization: str, *rest: Any) -> list[Tensor]:
    K = x.shape[-1]
    M = x.numel() // max(K, 1)
    found = list[Tensor]()
    for shape, rows in ((x.shape, M), ((K, (M + MULTIPLE - 1) // MULTIPLE * MULTIPLE), K)):
        found.append(x.new_empty(shape, dtype=E4M3))
        found.append(x.new_empty((rows, 1), dtype=torch.float32))
    for _ in range(1 + NORMS[normalization].has_mean):
        found.append(x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
    return found


# Returns the rows `[..., K]` in e4m3 and their scales `[M, 1]`; their transpose `[K, M]`, padded
# with zeros to a multiple of 16, and its scales `[K, 1]`; rstd `[..., 1]` in float32, and the mean
# for a norm that has one. A scale that all share is repeated.
norm_rows = define(
    "fp8_norm_rows(Tensor x, Tensor? gamma, Tensor? beta, str normalization, float eps, "
    "float weight_offset, str scaling, bool power_of_two) -> Tensor[]",
    _fake_norm_rows,
    unseen(_norm_rows),
)
