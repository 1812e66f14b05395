"""RMSNorm of heads and rotary position embedding as a composition of PyTorch's ops.

    z = x / sqrt(mean(x^2) + eps) (gamma + offset);  y = z cos + J(z) sin

J rotates pairs of elements by 90 degrees: (a, b) -> (-b, a), where a and b are neighbors or at a
distance of `rotary / 2` (Su et al., RoFormer, arXiv 2104.09864). Elements beyond the first `rotary`
are not rotated. Both steps are computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_norm.reference import widened


class Heads(NamedTuple):
    """The tensors of a call, None for absent ones.

    Attributes:
        x: Heads, shape `[..., H, D]`.
        gamma: Weight of their norm, shape `[D]`.
        cos: Cosines, shape `[P, A]`: row m of the flattened rows `[...]` uses those of m % P. A is
            the number of elements that are rotated, or half of it.
        sin: Sines, shape `[P, A]`.
    """

    x: Tensor
    gamma: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


class Caches(NamedTuple):
    """Where two tensors of heads are stored, token by token.

    Attributes:
        seconds: Receives the second tensor of a call, shape `[B, H, S, D]`.
        thirds: Receives the third, in this shape.
        slots: Which of the S slots each of T tokens is stored in, int64 `[T]`.
    """

    seconds: Tensor
    thirds: Tensor
    slots: Tensor


class Rotation(NamedTuple):
    """What a call computes, without its tensors.

    Attributes:
        is_normalized: Whether heads are divided by their root mean square.
        eps: Added to the mean square.
        weight_offset: Added to gamma.
        is_interleaved: Whether an element is rotated with its neighbor.
        is_half: Whether there is an angle for each pair, not for each element.
    """

    is_normalized: bool = False
    eps: float = 1e-6
    weight_offset: float = 0.0
    is_interleaved: bool = False
    is_half: bool = False

    def size(self, t: Heads) -> int:
        """Return how many elements of a head are rotated."""
        return 0 if t.cos is None else t.cos.shape[1] * (1 + self.is_half)


def by_pytorch(t: Heads, rotation: Rotation) -> Tensor:
    """Return the heads, normalized and rotated; differentiable.

    Args:
        t: The tensors.
        rotation: What to compute.
    """
    z = widened(t.x)
    if rotation.is_normalized:
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + rotation.eps)
        if t.gamma is not None:
            z = z * (widened(t.gamma) + rotation.weight_offset)
    if t.cos is None or t.sin is None:
        return z.to(t.x.dtype)
    R = rotation.size(t)
    cos, sin = (_for_each(v, t.x, rotation) for v in (t.cos, t.sin))
    turned, rest = z[..., :R], z[..., R:]
    turned = turned * cos + _turned(turned, rotation.is_interleaved) * sin
    return torch.cat((turned, rest), -1).to(t.x.dtype)


def _for_each(angles: Tensor, x: Tensor, rotation: Rotation) -> Tensor:
    """Return the angles of each element of the rows, which broadcast against the heads."""
    if rotation.is_half:
        angles = (
            angles.repeat_interleave(2, -1)
            if rotation.is_interleaved
            else torch.cat((angles, angles), -1)
        )
    rows = x.shape[:-2].numel()
    repeated = angles.repeat(rows // max(angles.shape[0], 1), 1)
    return widened(repeated).reshape(*x.shape[:-2], 1, angles.shape[-1])


def _turned(z: Tensor, is_interleaved: bool) -> Tensor:
    if is_interleaved:
        pairs = z.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    a, b = z.chunk(2, -1)
    return torch.cat((-b, a), -1)
