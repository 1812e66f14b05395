"""An MLP's hidden rows that stay in FP8 by one scale, which a bound of frozen parameters gives."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import (
    BF16,
    BOUNDED,
    CASES,
    EXACT,
    NORMS,
    K,
    M,
    N,
    adversarial,
    assert_clean_but_for,
    by_rows,
    exact,
    exact_hidden,
    frozen,
    heavy_tails,
    hidden_of,
    layer,
    matrix,
    operands,
    same,
    scales,
    tailed,
    with_own_powers_of_two,
)
from fp8_kernels import running
from fp8_products import LEAST, SHORT, decibels
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm.activations import ACTIVATIONS, PLAIN, is_gate

OPS = torch.ops.fused_norm
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(("activation", "change"), BOUNDED)
@pytest.mark.parametrize("normalization", NORMS)
def test_no_row_exceeds_the_bound(
    normalization: str, activation: str, change: Any, no_grad: None
) -> None:
    """Rows that are as bad as can be stay numbers, and come near what the scale leaves room for."""
    mlp = frozen(normalization, activation, change)
    x = adversarial(mlp)
    with scales() as used:
        found = hidden_of(mlp, x)
    assert used[0] > 0
    assert found.isfinite().all()
    largest = float(found.abs().max()) / (448 * used[0])
    # A scale is rounded up to a power of two; a mean is subtracted, and shifts are not aligned.
    assert 0.2 < largest <= 1
    assert mlp(x).isfinite().all()


@pytest.mark.parametrize("change", [None, heavy_tails])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_tailed", [False, True])
def test_precision(
    normalization: str, activation: str, change: Any, is_tailed: bool, no_grad: None
) -> None:
    """Hidden rows and results are as near to exact ones as with a scale for each row.

    A row's own power of two gives the same numbers; of its own largest number, that one is exact.
    """
    mlp = frozen(normalization, activation, change, size=(K, 4 * N))
    x = tailed() if is_tailed else matrix(M, K)
    truth = exact_hidden(mlp, x)
    with scales() as used:
        ours, y = hidden_of(mlp, x), mlp(x)
    assert all(used)
    with scales(fewest=1 << 40):
        theirs, other = hidden_of(mlp, x), mlp(x)
    wide = copy.deepcopy(mlp).double()
    wide.recipe = None
    exact = wide(x.double())
    # Of a row of a gate, the largest number has a larger part of the energy.
    short = SHORT + 0.15 * is_gate(activation)
    for found, least, true in ((ours, theirs, truth), (y, other, exact)):
        assert decibels(found, true) > decibels(least, true) - short
        # No row is worse than others.
        noise, size = ((v - true).norm(dim=1) / true.norm(dim=1) for v in (found, least))
        assert noise.max() < 1.3 * size.max()
    # A product of two products has the noise of both.
    assert decibels(ours, truth) > LEAST - 2.5 * is_gate(activation)
    assert abs(decibels(ours, truth) - decibels(with_own_powers_of_two(mlp, x), truth)) < 0.05


@pytest.mark.parametrize("name", PLAIN)
def test_no_activation_exceeds_its_argument(name: str) -> None:
    """The bound of what is activated is one of what it becomes."""
    h = torch.linspace(-50, 50, 100001, dtype=torch.float64)
    assert (PLAIN[name].function(h).abs() <= h.abs()).all()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("residual", [False, True])
def test_mlp(
    recipe: str, normalization: str, activation: str, residual: bool, tmp_path: Path, no_grad: None
) -> None:
    """The first product stores hidden rows, and nothing passes over them."""
    mlp, x = layer(normalization, activation, recipe=recipe), matrix(2, 70, K)
    more = {"residual_out": x} if residual else {}
    fn.freeze(mlp)
    expected = mlp(x, **more)
    assert not torch.equal(expected, by_rows(mlp, x, **more))
    fn.freeze(mlp)
    with running(tmp_path) as names:
        found = [mlp(x, **more) for _ in range(2)]
        assert torch.equal(*found)
        names.clear()
        mlp(x, **more)
    ran = [name for name, _ in names]
    # With one scale, PyTorch's norm comes first.
    assert ran == ["normalize"] * (recipe != "tensorwise") + ["linear", "linear"]
    assert decibels(found[0], expected) > 40


@pytest.mark.parametrize(("activation", "is_pair"), CASES)
def test_chain(activation: str, is_pair: bool, tmp_path: Path) -> None:
    """The record of the product that quantizes, with the results of PyTorch's ops."""
    for has_bias, scaling in itertools.product((False, True), ("row", "tensor")):
        given = operands(M, 144, 272, activation, has_bias, scaling, is_pair=is_pair)
        expected = OPS.fp8_hidden_by_python(*given)
        with running(tmp_path) as names:
            assert same(OPS.fp8_hidden(*given), expected)
            # Either with either, not all four: each takes most of a second.
            if has_bias == (scaling == "row"):
                opcheck(OPS.fp8_hidden.default, tuple(given), test_utils=OF_8_BITS)
        assert {name for name, _ in names} == {"linear"}
    # A bias in another dtype is for PyTorch's ops.
    given[7] = given[7].float()
    with running(tmp_path) as names:
        assert same(OPS.fp8_hidden(*given), OPS.fp8_hidden_by_python(*given))
    assert not names


@pytest.mark.parametrize("scale", [3.0, 2.0**-140, 2.0**127, math.inf, math.nan])
def test_a_scale_that_is_no_power_of_two_is_for_pytorch(scale: float, tmp_path: Path) -> None:
    """Kernels multiply by its reciprocal in bfloat16."""
    given = operands(M, 144, 272, "relu", True)
    given[-1] = scale
    expected = OPS.fp8_hidden_by_python(*given)
    with running(tmp_path):
        found = OPS.fp8_hidden(*given)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


def test_rows_that_are_no_numbers(no_grad: None) -> None:
    for normalization, activation in itertools.product(NORMS, ("gelu", "swiglu")):
        mlp, x = frozen(normalization, activation), matrix(M, K)
        clean = mlp(x)
        x[3, 5], x[120, 7] = torch.nan, torch.inf
        assert_clean_but_for(mlp(x), clean, [3, 120])


@pytest.mark.parametrize(("activation", "is_pair"), EXACT)
def test_what_exceeds_a_bound_is_not_a_number(activation: str, is_pair: bool) -> None:
    """Should rows not be what the bound took them for, they do not saturate."""
    given = operands(M, 144, 272, activation, True, is_pair=is_pair)
    given[-1] /= 4
    q, _ = OPS.fp8_hidden_by_python(*given)
    assert torch.equal(q.isnan(), exact(given).to(BF16).abs() > 448 * given[-1])
    assert q.isnan().any()
