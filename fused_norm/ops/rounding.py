"""A rounding to bfloat16 after which one to 8 bits gives what it gives of float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RoundedToOdd(torch.autograd.Function):
    """Numbers in bfloat16, those between two of it rounded to the one whose last bit is set.

    A number that is rounded to nearest twice may be moved to the middle of two numbers of 8 bits,
    and on to the wrong one. Rounded to odd, it stays on its side of the middle: numbers of 8 bits,
    and scales that are powers of two, are those of float32 (S. Boldo and G. Melquiond, "Emulation
    of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Return the numbers of a tensor in float32."""
        bits = values.view(torch.int32)
        # The sum has bit 16 if any bit below that is set, which bfloat16 has no room for.
        odd = (bits | ((bits & 0xFFFF) + 0xFFFF)) & -0x10000
        return odd.view(torch.float32).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient in float32, as that of a cast."""
        return gradient.float()
