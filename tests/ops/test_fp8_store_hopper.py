"""What Hopper's products store of hidden rows in FP8: each number, where tiles are partly empty."""

from __future__ import annotations

from typing import Any

import fp8_bounds
import pytest
import test_fp8_hidden as blocks
import torch
from fp8_bounds import CASES, EXACT, same
from test_fp8_blocks import VECTORS, on_hopper, ran
from torch import Tensor

from fused_norm import recipes
from fused_norm.activations import is_gate
from fused_norm.recipes import E4M3

pytestmark = [*on_hopper, pytest.mark.usefixtures("no_grad")]
OPS = torch.ops.fused_norm
# Of any tile, the last one has 16 columns, and as many rows or fewer.
M, K, N = 300, 272, 400
LAST = N - 16
# Scales: one, which is given, or those of blocks.
BLOCKS = [case for case in CASES if case[1] or not is_gate(case[0])]
EACH = [("row", *case) for case in CASES] + [(VECTORS, *case) for case in BLOCKS]
each = pytest.mark.parametrize(("scaling", "activation", "is_pair"), EACH)


def operands(
    scaling: str, activation: str, is_pair: bool, M: int = M, K: int = K, N: int = N
) -> list[Any]:
    """Return what the op is called with: sums of products that are not rounded, near one."""
    if scaling == VECTORS:
        make = blocks.whole_numbers
        given = blocks.operands(M, K, N, activation, is_pair, make, False, True)
    else:
        given = fp8_bounds.operands(M, K, N, activation, True, is_pair=is_pair)
    given[1] = given[1] / 32
    for i in (7, 12):
        given[i] = None if given[i] is None else given[i] / 32
    given[-1] /= 32 ** (1 + is_gate(activation))
    return given


def stored(given: list[Any]) -> list[Tensor]:
    """Return what the kernel stores."""
    gpu = blocks.on("cuda", given)
    found, names = ran(lambda: OPS.fp8_hidden(*gpu))
    assert any("in_8_bits" in name for name in names), names
    return [v.cpu() for v in found]


def values(found: list[Tensor], scaling: str) -> Tensor:
    q, scale = found
    return recipes.dequantize(q, scale, scaling, torch.float64)


def exact(given: list[Any], scaling: str) -> Tensor:
    return blocks.exact(given) if scaling == VECTORS else fp8_bounds.exact(given)


@each
@pytest.mark.parametrize(
    "size", [(M, K, N), (129, 1040, 1168), (140, 64, 16), (2049, 1024, 4112), (4096, 256, 3088)]
)
def test_each_number(
    scaling: str, activation: str, is_pair: bool, size: tuple[int, int, int]
) -> None:
    given = operands(scaling, activation, is_pair, *size)
    found, truth = stored(given), exact(given, scaling)
    scale = recipes.spread(found[1], scaling, found[0].shape).double()
    # Half a unit in e4m3 and in bfloat16, and the error of the formula; far below 0 that is more.
    most = truth.abs() * (1 / 16 + 1 / 512 + 2.1e-3) + scale * (1.01 / 1024) + 1e-5
    if scaling == "row" and activation in ("gelu", "gelu_tanh"):
        # In float16: a part of h.
        most += 1e-3 * exact([*given[:8], "", *given[9:]], scaling).abs()
    assert ((values(found, scaling) - truth).abs() <= most).all()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("exponent", [-40, -20, -11, -8, -7, 0, 6, 9, 10, 20])
def test_scales_that_float16_does_not_reach(activation: str, exponent: int) -> None:
    """Rows of any size: where float16 would overflow or lose them, float32 computes."""
    given = operands("row", activation, False)
    given[1] = given[1] * 2.0**exponent
    given[7] = torch.zeros_like(given[7])
    given[-1] *= 2.0**exponent
    found = stored(given)
    truth = exact(given, "row")
    h = exact([*given[:8], "", *given[9:]], "row")
    most = truth.abs() * (1 / 16 + 1 / 512 + 2.1e-3) + given[-1] * (1.01 / 1024) + 1e-3 * h.abs()
    assert ((values(found, "row") - truth).abs() <= most).all()


@pytest.mark.parametrize(("activation", "is_pair"), EXACT)
@pytest.mark.parametrize("scaling", ["row", VECTORS])
def test_what_earlier_tiles_leave_counts_nowhere(
    scaling: str, activation: str, is_pair: bool
) -> None:
    """Biases cancel sums in whole tiles; by themselves they would exceed the bound of the last."""
    if (scaling, activation, is_pair) not in EACH:
        pytest.skip("passes quantize this")
    # Blocks have more than one tile each.
    given = operands(scaling, activation, is_pair, 20000, 64, N)
    given[0], given[1] = torch.ones(20000, 64).to(E4M3), torch.ones_like(given[1])
    for weight, bias in ((2, 7), (10, 12)):
        if given[weight] is None:
            continue
        given[weight + 1] = torch.ones_like(given[weight + 1])
        sums = given[weight].float().sum(1)
        for first in range(0, len(sums), N):
            own = slice(first, first + LAST)
            given[weight].view(torch.uint8)[first + LAST : first + N] = 0
            given[bias][own] = -sums[own].to(torch.bfloat16)
            given[bias][first + LAST : first + N] = 2.0
    if scaling == "row":
        given[-1] = 2.0**-6
    assert same(stored(given), OPS.fp8_hidden_by_python(*given))


@each
def test_rows_that_are_no_numbers(scaling: str, activation: str, is_pair: bool) -> None:
    given = operands(scaling, activation, is_pair)
    clean = stored(given)
    given[0].view(torch.uint8)[7, 20] = given[0].view(torch.uint8)[290, 200] = 0x7F
    given[1][3], given[1][M - 1], given[1][130] = torch.nan, torch.nan, torch.inf
    found, truth = stored(given), exact(given, scaling)
    bad = torch.zeros(M, dtype=torch.bool)
    bad[[3, 7, 290, M - 1]] = True
    assert not values(found, scaling)[bad].isfinite().any()
    assert not values(found, scaling)[~truth.isfinite()].isfinite().any()
    bad[130] = True
    assert same([v[~bad] for v in found], [v[~bad] for v in clean])


@each
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_columns_that_are_no_numbers(
    scaling: str, activation: str, is_pair: bool, number: float
) -> None:
    given = operands(scaling, activation, is_pair)
    clean = values(stored(given), scaling)
    given[7][N - 1] = number
    found, truth = values(stored(given), scaling), exact(given, scaling)
    assert not found[~truth.isfinite()].isfinite().any()
    assert torch.equal(found[:, :LAST], clean[:, :LAST])


@pytest.mark.parametrize(("activation", "is_pair"), CASES)
def test_what_exceeds_a_bound_is_not_a_number(activation: str, is_pair: bool) -> None:
    given = operands("row", activation, is_pair)
    given[-1] /= 4
    found, truth = values(stored(given), "row"), exact(given, "row").abs() / (448 * given[-1])
    assert found[truth > 1.01].isnan().all()
    fits = (truth < 0.99).all(1)
    assert 0 < int(fits.sum()) < M
    assert found[fits].isfinite().all()
