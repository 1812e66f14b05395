"""Numbers rounded to odd in bfloat16, of which 8 bits are those of float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_norm import recipes
from fused_norm.ops.rounding import RoundedToOdd
from fused_norm.recipes import E4M3, Cast


def of_bits(*bits: int) -> Tensor:
    """Return the numbers in float32 that have some bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits_of(values: Tensor) -> list[int]:
    """Return the bits of numbers in bfloat16."""
    return [bits & 0xFFFF for bits in values.view(torch.int16).tolist()]


@pytest.mark.parametrize("scaling", ["row", "128x128"])
def test_have_the_bits_of_float32(scaling: str) -> None:
    torch.manual_seed(0)
    v = torch.randn(256, 512) * torch.logspace(-18, 18, 256)[:, None]
    # At the midpoint of two 8-bit numbers, and right next to it; scales at their limits.
    v[:64] = (torch.randint(8, 16, (64, 512)) + 0.5) * (1 + torch.randn(64, 512) * 1e-6)
    v[64, 0] = v[65].abs().max() * 448
    v[66:70, 3] = torch.tensor([448, 448 * (1 + 2**-23), 448 * (1 - 2**-24), 1e-12])
    v[66:70, :3] = 0
    v[66:70, 4:] = 0
    rounded = RoundedToOdd.apply(v)
    assert rounded.dtype is torch.bfloat16
    for a, e in zip(
        recipes.quantize(rounded, Cast(E4M3, scaling), True),
        recipes.quantize(v, Cast(E4M3, scaling), True),
        strict=True,
    ):
        assert torch.equal(a.float(), e.float())
    nearest, exact = (
        recipes.quantize(each, Cast(E4M3, scaling), True)[0].float() for each in (v.bfloat16(), v)
    )
    assert not torch.equal(nearest, exact)


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_infinities_and_zeros_stay_what_they_are(sign: int) -> None:
    rounded = RoundedToOdd.apply(of_bits(sign | 0x7F800000, sign))
    assert bits_of(rounded) == [sign >> 16 | 0x7F80, sign >> 16]


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_nan_stay_nan(sign: int) -> None:
    """Those too of whose mantissa bfloat16 keeps no bit, and those that a carry would end."""
    mantissas = [1, 0x8000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7F0001, 0x7FFFFF]
    rounded = RoundedToOdd.apply(of_bits(*(sign | 0x7F800000 | m for m in mantissas)))
    assert rounded.isnan().all()


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_the_largest_and_the_smallest_stay_finite_and_apart_from_zero(sign: int) -> None:
    rounded = RoundedToOdd.apply(of_bits(*(sign | bits for bits in (0x7F7FFFFF, 0x7F7E0001, 1))))
    assert bits_of(rounded) == [sign >> 16 | bits for bits in (0x7F7F, 0x7F7F, 1)]
