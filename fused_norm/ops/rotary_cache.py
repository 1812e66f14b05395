"""Rotates queries and keys, and stores keys and values in their caches: an op that writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_norm.chain import rotary as kernels
from fused_norm.ops.registration import define_in_python
from fused_norm.ops.rotary import OPTIONS, rotated_both, unpacked
from fused_norm.rotation import Caches, Heads

# Where keys and values have their tokens, of four dimensions.
TOKENS = 2
_COUNT = len(Heads._fields)


def _forward(
    x: Tensor,
    gamma: Tensor | None,
    second_x: Tensor,
    second_gamma: Tensor | None,
    third_x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *rest: Any,
) -> Tensor:
    seconds, thirds, slots, *options = rest
    into = Caches(seconds, thirds, slots)
    t, rotation = unpacked((x, gamma, cos, sin, *options))
    second, _ = unpacked((second_x, second_gamma, cos, sin, *options))
    third = unpacked((third_x, None, None, None, *options))[0].x
    if kernels.serves_caches(t, second, third, into, rotation) and _are_slots(into):
        y = kernels.forward_into_caches(t, second, third, into, rotation)
        # PyTorch's ops that write do this as well, so that autograd sees a saved tensor change.
        changed = [cache for cache in into[:2] if not cache.is_inference()]
        torch.autograd.graph.increment_version(changed)
        return y
    y, second_y = rotated_both(x, gamma, second_x, second_gamma, cos, sin, *options)
    for cache, stored in ((seconds, second_y), (thirds, third_x)):
        cache.index_copy_(TOKENS, slots, stored.transpose(1, 2))
    return y


def _are_slots(into: Caches) -> bool:
    """Return whether caches have all slots: PyTorch raises the error. On a GPU, a kernel looks."""
    if into.slots.is_cuda:
        return True
    least, most = into.slots.aminmax()
    return int(least) >= 0 and int(most) < into.seconds.shape[TOKENS]


def _fake_forward(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


define_in_python(
    "rotary_into_caches(Tensor x, Tensor? gamma, Tensor second_x, Tensor? second_gamma, "
    "Tensor third_x, Tensor? cos, Tensor? sin, Tensor(a!) seconds, Tensor(b!) thirds, "
    f"Tensor slots, {OPTIONS}) -> Tensor",
    _forward,
    _fake_forward,
)
OP = torch.ops.fused_norm.rotary_into_caches.default
