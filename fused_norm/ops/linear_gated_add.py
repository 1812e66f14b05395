"""The op of a Linear layer, a gate on its result, and the residual sum: the end of adaLN-Zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.composition import Added
from fused_norm.ops.flops import count_flops
from fused_norm.ops.linear_add import fits, linear_add
from fused_norm.ops.operands import adds_in_product, is_small
from fused_norm.ops.registration import define, is_watched, may_follow
from fused_norm.ops.validation import are_strided


def _fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def gated_by_pytorch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gate: Tensor
) -> Tensor:
    """Return residual + gate (x weight^T + bias), with PyTorch's ops."""
    return torch.addcmul(residual, gate, F.linear(x, weight, bias)).contiguous()


_op = define(
    "linear_gated_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor gate) "
    "-> Tensor",
    _fake,
    gated_by_pytorch,
)
count_flops("linear_gated_add", lambda x, weight, *_: 2 * x.numel() * weight.shape[0])


def linear_gated_add(t: Added, gate: Tensor, invariant: bool = False) -> Tensor:
    """Return residual + gate (x weight^T + bias), with one product if that is faster.

    Where a backward may follow, PyTorch's ops compute it, which keep what that needs.

    Args:
        t: The tensors.
        gate: Broadcasts against the result.
        invariant: Whether rows may not depend on each other.

    Raises:
        RuntimeError: If `invariant`, and there is no product for it; or as PyTorch's ops do.
    """
    x, weight, bias, residual = t
    if not invariant and _is_gated_in_product(t, gate):
        total: Tensor = _op(*t, gate)
        return total
    y = linear_add(Added(x, weight, bias), True) if invariant else F.linear(x, weight, bias)
    assert residual is not None
    return torch.addcmul(residual, gate, y)


def _is_gated_in_product(t: Added, gate: Tensor) -> bool:
    x, weight, _, residual = t
    if not isinstance(x, Tensor) or not x.is_cuda or residual is None or not fits(t):
        return False
    if may_follow() and any(v is not None and v.requires_grad for v in (*t, gate)):
        return False
    if not are_strided((gate,), x) or gate.dtype is not x.dtype:
        return False
    groups = groups_of(gate.shape, residual.shape)
    if not (groups and adds_in_product(x, weight, groups)):
        return False
    return is_watched() or not is_small(x.numel() * weight.shape[0], x.device, False)


def groups_of(gate: Sequence[int], rows: Sequence[int]) -> int:
    """Return how many groups of consecutive rows have a gate each; 0 if it has another form.

    Args:
        gate: Its shape, which should broadcast against that of the rows.
        rows: Their shape `[..., N]`.
    """
    missing = len(rows) - len(gate)
    sizes = (*(1,) * missing, *gate)
    prefix = len(rows) - 1
    if missing < 0 or not gate or sizes[-1] != rows[-1]:
        return 0
    while prefix and sizes[prefix - 1] == 1:
        prefix -= 1
    return math.prod(sizes[:prefix]) if sizes[:prefix] == (*rows[:prefix],) else 0
