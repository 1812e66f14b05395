"""The formulas of activations: that of a GPU in float32, and choices that leave out other kinds."""

from __future__ import annotations

import pytest
import torch
from mojo_programs import needs_mojo, printed
from torch import Tensor

from fused_norm.activations import PLAIN

pytestmark = needs_mojo
KINDS = {"": 0} | {name: each.number for name, each in PLAIN.items()}
NO_NUMBERS = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])


def computed(name: str, h: Tensor) -> Tensor:
    """Return a column for each way to compute an activation of numbers in float32."""
    bits = (h.view(torch.int32).long() & 0xFFFFFFFF).tolist()
    lines = printed("activations", [], [(KINDS[name], *bits)])
    found = torch.tensor([list(map(int, line.split())) for line in lines])
    return found.to(torch.int32).view(torch.float32)


def numbers() -> Tensor:
    near, far = torch.linspace(-9, 9, 9001), torch.logspace(-30, 2, 301)
    return torch.cat([near, far, -far, torch.zeros(1), -torch.zeros(1)])


@pytest.mark.parametrize("name", KINDS)
def test_a_choice_that_knows_the_kind_has_the_same_bits(name: str) -> None:
    found = computed(name, torch.cat([numbers(), NO_NUMBERS])).view(torch.int32)
    assert torch.equal(found[:, 3], found[:, 2])
    assert torch.equal(found[:, 4], found[:, 2])


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_a_gpu_that_knows_the_kind_has_the_same_bits(name: str) -> None:
    """GELU does without a clamp then, also where powers of a number overflow."""
    large = torch.logspace(0.5, 38.5, 1001)
    found = computed(name, torch.cat([numbers(), large, -large, NO_NUMBERS]))
    torch.testing.assert_close(found[:, 1], found[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_the_formula_of_a_gpu(name: str) -> None:
    """Its error is below the half unit of bfloat16, 2^-9; next to nothing far below 0."""
    h = numbers()
    found, wide = computed(name, h)[:, 0].double(), h.double()
    exact = PLAIN[name].function(wide)
    # A CPU's powers of two are off by up to 7e-6, more than a GPU's.
    relative, absolute = torch.full_like(wide, 1e-5), 1e-12
    if name == "gelu":
        relative, absolute = torch.where(wide < 0, 1.8e-3, 2.1e-4), 3e-7
        relative[wide < -4] = 0
    assert ((found - exact).abs() <= relative * exact.abs() + absolute).all()
    near = (wide > -4) & (wide != 0)
    assert ((found - exact).abs() < exact.abs() / 512)[near].all()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_number_stays_visible(name: str) -> None:
    function = PLAIN[name].function if name else torch.clone
    # One by one: of vectors, PyTorch's GELU makes NaN of infinity on CPUs with AVX-512.
    expected = torch.stack([function(number) for number in NO_NUMBERS])
    for column in computed(name, NO_NUMBERS).unbind(1)[2:]:
        torch.testing.assert_close(column, expected, rtol=0, atol=0, equal_nan=True)
