"""A rounding to bfloat16 after which rounding to 8 bits gives the same as from float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RoundedToOdd(torch.autograd.Function):
    """Rounds to bfloat16: an inexact number goes to the neighbor whose last bit is set.

    Rounding to nearest twice may move a number to the midpoint of two 8-bit numbers first, and then
    to the wrong one. Rounded to odd, it stays on its side of the midpoint: 8-bit numbers and scales
    that are powers of two are the same as from float32 (S. Boldo and G. Melquiond, "Emulation of
    FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Return the numbers of a float32 tensor."""
        bits = values.view(torch.int32)
        # The sum has bit 16 set if any lower bit is, for which bfloat16 has no room.
        odd = (bits | ((bits & 0xFFFF) + 0xFFFF)) & -0x10000
        return odd.view(torch.float32).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient in float32, like that of a cast."""
        return gradient.float()
