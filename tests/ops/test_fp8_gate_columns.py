"""Hidden columns of a gate in FP8 that get powers of two, so that one scale serves all rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import BF16, NORMS, M, adversarial, assert_clean_but_for, hidden_of, matrix, tailed
from fp8_columns import RECIPES, K, N, assert_as_precise, folds, gated, large, spread, tails
from fp8_kernels import running
from fp8_products import decibels
from torch.testing._internal.optests import opcheck
from torch.utils.flop_counter import FlopCounterMode

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import GATES
from fused_norm.freeze import freeze_parameters
from fused_norm.recipes import E4M3, Cast

OPS = torch.ops.fused_norm
pytestmark = pytest.mark.usefixtures("no_grad")
KINDS = [
    spread(0.7),
    spread(1),
    large(1, 20),
    large(20, 1),
    large(1, 30, 64),
    large(5, 5, 20),
    tails,
]


def cases() -> Iterator[Any]:
    """Give changes, norms and rows; every other of these is slow, so that all pairs are tried."""
    for case in itertools.product(enumerate(KINDS), enumerate(NORMS), (False, True)):
        (i, change), (j, normalization), is_tailed = case
        marks: Any = pytest.mark.slow if (i + j + is_tailed) % 2 else ()
        yield pytest.param(change, normalization, is_tailed, marks=marks)


@pytest.mark.parametrize(("change", "normalization", "is_tailed"), list(cases()))
def test_precision(change: Any, normalization: str, is_tailed: bool) -> None:
    mlp = fn.freeze(gated(normalization, change, size=(1024, 2816)))
    # Of fewer rows, a few large ones would decide.
    assert_as_precise(mlp, tailed(1000, 1024) if is_tailed else matrix(1000, 1024))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", GATES.values())
@pytest.mark.parametrize("has_bias", [False, True])
def test_recipes_and_activations(recipe: str, activation: str, has_bias: bool) -> None:
    def change(mlp: fn.LayerNormMLP) -> None:
        spread(0.8)(mlp)
        if mlp.fc1_bias is not None:
            # As large as what they are added to.
            mlp.fc1_bias.copy_(mlp.fc1_weight.float().norm(dim=1) * mlp.fc1_bias.normal_().sign())

    mlp = fn.freeze(gated("LayerNorm", change, activation=activation, recipe=recipe, bias=has_bias))
    x = matrix(2, 70, K)
    assert_as_precise(mlp, x)
    assert_as_precise(mlp, x, residual_out=x)


@pytest.mark.parametrize("change", [spread(0.7), large(1, 30, 64), large(5, 5, 20)])
@pytest.mark.parametrize("normalization", NORMS)
def test_no_row_exceeds_the_bound(normalization: str, change: Any) -> None:
    """Each column's bound fits: rows that try one come near what its own power of two holds."""
    mlp = fn.freeze(gated(normalization, change, size=(1024, 384), activation="reglu"))
    x = adversarial(mlp, 768)
    with folds() as used:
        found = hidden_of(mlp, x)
    assert found.isfinite().all()
    (scale,) = used
    assert scale is not None
    largest = found.abs().amax(0) / (448 * scale)
    assert largest.max() <= 1
    # A mean is subtracted, and a scale is rounded up to a power of two.
    assert 0.2 < largest.median() < largest.max() < 3 * largest.median()


def test_rows_that_are_no_numbers() -> None:
    for normalization in NORMS:
        mlp, x = fn.freeze(gated(normalization)), matrix(M, K)
        clean = mlp(x)
        x[3, 5], x[120, 7] = torch.nan, torch.inf
        assert_clean_but_for(mlp(x), clean, [3, 120])


def test_zero_columns() -> None:
    """Of nothing, any scale is exact."""

    def change(mlp: fn.LayerNormMLP) -> None:
        spread(0.8)(mlp)
        mlp.fc1_weight[::5] = 0
        assert mlp.fc1_bias is not None
        mlp.fc1_bias.zero_()

    mlp = fn.freeze(gated(change=change))
    assert_as_precise(mlp, matrix(M, K))


def test_types() -> None:
    """Powers of two are exact in all of them, unless a type has too few exponents."""
    for dtype in (torch.float16, torch.float32):
        mlp, x = fn.freeze(gated(bias=False, dtype=dtype)), matrix(M, K).to(dtype)
        assert_as_precise(mlp, x)
    mlp = gated(dtype=torch.float16)
    assert mlp.fc1_bias is not None
    # Less than the least number of full precision, once they are divided.
    mlp.fc1_bias.copy_(mlp.fc1_bias.sign() * (2.0**-14 + 2.0**-24))
    with folds() as used:
        fn.freeze(mlp)(x.half())
    # What would be hidden exceeds the type.
    mlp = gated(bias=False, dtype=torch.float16)
    mlp.layer_norm_weight *= 64
    with folds() as more:
        fn.freeze(mlp)(x.half())
    assert used == more == [None]


@pytest.mark.parametrize("activation", GATES.values())
def test_a_gate_of_two_layers(activation: str) -> None:
    """It has the bits of one layer with both, and the weights of its own."""
    mlp, x = fn.freeze(gated("LayerNorm", activation=activation)), matrix(M, K)
    assert mlp.fc1_bias is not None
    weights, biases = ([v.clone() for v in w.chunk(2)] for w in (mlp.fc1_weight, mlp.fc1_bias))
    how: dict[str, Any] = {"normalization": "layer_norm", "recipe": "rowwise", "eps": mlp.eps}
    how |= {"norm_weight": mlp.layer_norm_weight, "norm_bias": mlp.layer_norm_bias}
    record = freeze_parameters([*mlp.parameters(), *weights, *biases])
    with folds() as used:
        second = (mlp.fc2_weight, mlp.fc2_bias)
        found = fn.norm_mlp(x, weights, biases, *second, activation=activation, **how)
        assert torch.equal(found, mlp(x))
    assert used[0] == used[1] is not None
    record.thaw()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("residual", [False, True])
def test_kernels(recipe: str, residual: bool, tmp_path: Path) -> None:
    """They take a scale for each column of any recipe, and nothing passes over hidden rows."""
    mlp, x = gated("LayerNorm", recipe=recipe), matrix(2, 70, K)
    more = {"residual_out": x} if residual else {}
    expected = fn.freeze(mlp)(x, **more)
    fn.freeze(mlp)
    with running(tmp_path) as names, folds() as used:
        mlp(x, **more)
        names.clear()
        found = mlp(x, **more)
    assert all(used)
    # With one scale, PyTorch's norm comes first.
    assert [n for n, _ in names] == ["normalize"] * (recipe != "tensorwise") + ["linear", "linear"]
    assert decibels(found, expected) > 40


def test_registration() -> None:
    """Its op, which a graph has, by itself; empty rows; the operations that it counts."""
    mlp, x = gated("LayerNorm"), matrix(M, K)
    assert mlp.fc1_bias is not None
    q, scale = recipes.quantize(x, Cast(E4M3, "row"), False)
    pairs = [v.chunk(2) for v in (mlp.fc1_weight, mlp.fc1_bias)]
    for weights, biases in (([mlp.fc1_weight], [mlp.fc1_bias]), pairs):
        given: list[Any] = [q, scale, [*weights], [*biases], "row", "row", False, "swiglu", BF16]
        given += [mlp.fc2_weight, mlp.fc2_bias, x, mlp.layer_norm_weight, None, 0.0]
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        opcheck(OPS.fp8_gated_mlp.default, tuple(given), test_utils=checks)
        with FlopCounterMode(display=False) as counter:
            OPS.fp8_gated_mlp(*given)
        assert counter.get_total_flops() == 2 * M * K * 3 * N
        given[0], given[1], given[11] = q[:0], scale[:0], x[:0]
        assert OPS.fp8_gated_mlp(*given).shape == (0, K)
