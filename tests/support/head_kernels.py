"""What the head's Hopper kernels compute, by PyTorch's ops on the addresses of a record.

It reads and writes what the kernels do, in their order and with their roundings, so that what is
around them can be tried on a CPU, and the kernels have a second source to be read against.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from fused_norm.call.head_record import HeadCall
from fused_norm.chain import head_tiles

LARGEST, MARGIN = 100.0, 40.0
LEAST, MOST = 1e-30, 1e30
LEAST_FACTOR = 2.0**-20
FLOAT, BFLOAT, INT, LONG = torch.float32, torch.bfloat16, torch.int32, torch.int64


def at(address: int, dtype: torch.dtype, *shape: int) -> Any:
    """Return a tensor on memory that others own; None for address 0."""
    if not address:
        return None
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def limited(z: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return cap tanh(z / cap) and its slope, as op/head/softcap.mojo has them."""
    if not cap:
        return z, torch.ones_like(z)
    u = torch.exp(-2 / cap * z.abs())
    return torch.copysign(cap * (1 - u) / (1 + u), z), 4 * u / (1 + u).square()


def run(function: str, call: HeadCall, device: torch.device) -> None:
    """Stand in for `head_sm90.run` with "exponentials", "rows" and "input_gradient"."""
    assert device.type == "cpu"
    M, K, V = call.M, call.K, call.V
    if function == "input_gradient":
        _input_gradient(call)
        return
    x, weight = at(call.x, BFLOAT, M, K).float(), at(call.weight, BFLOAT, V, K).float()
    bias, offsets = at(call.bias, BFLOAT, V), at(call.offsets, FLOAT, M)
    z, slope = limited(x @ weight.t() + (0 if bias is None else bias.float()), call.softcap)
    pitched = at(call.exponentials, BFLOAT, M, call.pitch)
    kept = None if pitched is None else pitched[:, :V]
    if function == "rows":
        _rows(call, x, at(call.target, LONG, M), z, slope, _exponentials(z, offsets)[0], kept)
        return
    assert function == "exponentials"
    samples = at(call.samples, BFLOAT, M, call.sample_count).float()
    if bias is not None:
        samples = samples + bias[:: call.sample_step][: call.sample_count]
    offsets.copy_(limited(samples.amax(1), call.softcap)[0] + MARGIN)
    _, found = _exponentials(z, offsets)
    bad = (found > MOST) | (found < LEAST)
    offsets.copy_(torch.where(bad, z.amax(1), offsets))
    e, found = _exponentials(z, offsets)
    # The sums of tiles are no more than their parts.
    at(call.sums, FLOAT, M).copy_(found)
    if kept is not None:
        kept.copy_(e * slope)


def _exponentials(z: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    e = torch.exp2(((z - offsets.unsqueeze(1)) * math.log2(math.e)).clamp(max=LARGEST))
    return e, e.sum(1)


def _input_gradient(call: HeadCall) -> None:
    M, K, V = call.M, call.K, call.V
    assert (call.dx_columns, bool(call.dx_is_split)) in {tile[:2] for tile in head_tiles.TILES}
    e = at(call.exponentials, BFLOAT, M, call.pitch)[:, :V].float()
    sums = e @ at(call.weight, BFLOAT, V, K).float()
    at(call.dx, BFLOAT, M, K).copy_(sums * at(call.factors, FLOAT, M).unsqueeze(1))


def _rows(
    call: HeadCall, x: Tensor, target: Tensor, z: Tensor, slope: Tensor, e: Tensor, kept: Any
) -> None:
    (M, K), V = x.shape, call.V
    sums = at(call.sums, FLOAT, M)
    lse = at(call.offsets, FLOAT, M) + sums.log()
    is_inside = (target >= 0) & (target < V)
    counts = (target != call.ignore_index) & is_inside
    if call.are_in_range and not (counts | (target == call.ignore_index)).all():
        at(call.are_in_range, INT, 1).zero_()
    column = torch.where(counts, target, 0).unsqueeze(1)
    logit, of_label = z.gather(1, column)[:, 0], slope.gather(1, column)[:, 0]
    class_weight = at(call.class_weight, FLOAT, V)
    own = torch.ones(M) if class_weight is None else class_weight[column[:, 0]]
    total = at(call.class_weight_sum, FLOAT, 1) if call.class_weight_sum else torch.tensor(float(V))
    smooth, hard = call.label_smoothing / V, (1 - call.label_smoothing) * own
    losses = hard * (lse - logit) + call.z_loss * lse.square()
    if call.mean_weight:
        others = x @ at(call.mean_weight, FLOAT, K)
        others = others + (at(call.mean_bias, FLOAT, 1) if call.mean_bias else 0)
        losses = losses + smooth * (lse * total - others)
    at(call.losses, FLOAT, M).copy_(torch.where(counts, losses, 0))
    at(call.logsumexp, FLOAT, M).copy_(lse)
    if not call.scales:
        return
    scale = torch.where(counts, at(call.scales, FLOAT, M), 0)
    of_sum = scale * (hard + smooth * total + 2 * call.z_loss * lse)
    if call.logsumexp_scales:
        of_sum = of_sum + at(call.logsumexp_scales, FLOAT, M)
    least = (scale * hard).abs() * LEAST_FACTOR
    of_sum = torch.where(of_sum.abs() < least, least, of_sum)
    factors = of_sum / sums
    at(call.factors, FLOAT, M).copy_(factors)
    entry = (e.gather(1, column)[:, 0] - scale * hard / of_sum * sums) * of_label
    entry = torch.where(counts & (of_sum != 0), entry, kept.gather(1, column)[:, 0].float())
    kept.scatter_(1, column, entry.to(BFLOAT).unsqueeze(1))
    at(call.scaled, BFLOAT, M, K).copy_(x * factors.unsqueeze(1))
