"""An MLP's hidden rows that stay in FP8 by one scale, which a bound of frozen parameters gives."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
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
    assert_one_scale_by_the_backend,
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
from fused_norm import recipes
from fused_norm.activations import ACTIVATIONS, PLAIN, is_gate
from fused_norm.freeze import freeze_parameters
from fused_norm.ops.quantized import scaled_weight
from fused_norm.recipes import E4M3, Cast

OPS = torch.ops.fused_norm
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


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


def outlier(mlp: fn.LayerNormMLP) -> None:
    mlp.fc1_weight[7] *= 1000


def pruned(mlp: fn.LayerNormMLP) -> None:
    mlp.fc1_weight[: N // 2 + 1] = 0


def infinite(mlp: fn.LayerNormMLP) -> None:
    mlp.fc1_weight[3, 4] = torch.inf


def not_a_number(mlp: fn.LayerNormMLP) -> None:
    mlp.layer_norm_weight[5] = torch.nan


def far_bias(mlp: fn.LayerNormMLP) -> None:
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[9] = 1e5


OF_NO_USE = [outlier, pruned, infinite, not_a_number, far_bias]


@pytest.mark.parametrize("change", OF_NO_USE)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_bounds_that_are_of_no_use(activation: str, change: Any, no_grad: None) -> None:
    """Typical values would have too few bits: each row has its own scale, as usual."""
    mlp, x = frozen(activation=activation, change=change), matrix(M, K)
    with scales() as used:
        found = mlp(x)
    assert used == [0.0]
    fn.unfreeze(mlp)
    torch.testing.assert_close(mlp(x), found, rtol=0, atol=0, equal_nan=True)


def test_calls_without_a_bound(no_grad: None) -> None:
    """Not frozen, frozen for a context, of few rows, modulated, no MLP, other recipes."""
    x = matrix(M, K)
    with scales() as used:
        mlp = layer()
        expected = mlp(x)
        with fn.frozen_parameters(mlp):
            assert all(torch.equal(mlp(x), expected) for _ in range(3))
        assert not any(used)
        fn.freeze(mlp)
        assert torch.equal(mlp(x[:128]), expected[:128])
        assert not any(used)
        used.clear()
        frozen(recipe="blockwise")(x)
        mlp.activation, mlp.eps = "gelu", -1e-9
        mlp(x)
        norm = frozen()
        weights = (norm.fc1_weight, norm.fc1_bias)
        how: dict[str, Any] = {"normalization": "rms_norm", "recipe": "rowwise"}
        fn.norm_linear(x, *weights, **how, activation="gelu", norm_weight=norm.layer_norm_weight)
        assert not used
        mlp.eps = 1e-5
        assert not torch.equal(mlp(x), expected)
        assert all(used)


@pytest.mark.parametrize("name", ["layer_norm_weight", "layer_norm_bias", "fc1_bias", "fc1_weight"])
@pytest.mark.parametrize("way", ["unfreeze", "train", "load", "data", "again"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_no_bound_is_stale(name: str, way: str, activation: str, no_grad: None) -> None:
    """Whatever ends freezing ends the bound with it, and new memory has none."""
    mlp, x = frozen("LayerNorm", activation), matrix(M, K)
    with scales() as used:
        mlp(x)
        before = used[-1]
        values = getattr(mlp, name) * 64
        if way == "unfreeze":
            fn.unfreeze(mlp)
            getattr(mlp, name).copy_(values)
        elif way == "train":
            mlp.train().eval()
            getattr(mlp, name).copy_(values)
        elif way == "load":
            mlp.load_state_dict({**mlp.state_dict(), name: values})
        elif way == "data":
            getattr(mlp, name).data = values
        else:
            getattr(mlp, name).copy_(values)
        if way in ("data", "unfreeze", "train", "load"):
            # Not all of them are frozen.
            mlp(x)
            assert not used[1:] or used[-1] == 0
        fn.freeze(mlp)
        found = mlp(x)
        assert used[-1] != before
    other = layer("LayerNorm", activation)
    getattr(other, name).copy_(values)
    assert torch.equal(fn.freeze(other)(x), found)


def test_other_records_of_the_same_parameters(no_grad: None) -> None:
    """A bound belongs to what froze all parameters and to the weight in 8 bits that it is of."""
    mlp, x = layer("LayerNorm"), matrix(M, K)
    of_weight = freeze_parameters([mlp.fc1_weight])
    with scales() as used:
        mlp(x)
        of_all = freeze_parameters(mlp.parameters())
        mlp(x)
        assert used[0] == 0
        assert used[1] > 0
        of_all.thaw()
        mlp(x)
        assert used[2] == 0
        mlp.layer_norm_weight.mul_(64)
        again = freeze_parameters(mlp.parameters())
        mlp(x)
        assert used[3] > used[1]
        # A write that goes unnoticed, until the weight is quantized again.
        mlp.fc1_weight.mul_(64)
        mlp(x)
        assert used[4] == used[3]
        of_weight.thaw()
        mlp(x)
        assert used[5] > used[4]
        again.thaw()


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
            opcheck(OPS.fp8_hidden.default, tuple(given), test_utils=OF_8_BITS)
        assert {name for name, _ in names} == {"linear"}
    # A bias in another dtype is for PyTorch's ops.
    given[7] = given[7].float()
    with running(tmp_path) as names:
        assert same(OPS.fp8_hidden(*given), OPS.fp8_hidden_by_python(*given))
    assert not names


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_offloaded(activation: str, no_grad: None) -> None:
    x = matrix(M, K)
    expected = frozen(activation=activation)(x)
    mlp = fn.freeze(layer(activation=activation), offload=True)
    with scales() as used:
        assert all(torch.equal(mlp(x), expected) for _ in range(3))
    assert used[0] > 0
    assert len(set(used)) == 1


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_compiled(activation: str, no_grad: None) -> None:
    """A graph asks for the bound when it runs, so that it does what calls do."""
    for rows in (130, 20):
        mlp, x = frozen(activation=activation), matrix(rows, K)
        expected = mlp(x)
        for backend in ("aot_eager", "fused_norm"):
            torch.compiler.reset()
            compiled = torch.compile(mlp, backend=backend, fullgraph=True)
            assert torch.equal(compiled(x), expected)
        fn.unfreeze(mlp)
        torch.compiler.reset()
        by_rows = mlp(x)
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), by_rows)


def test_frozen_by_the_backend(no_grad: None) -> None:
    """A model of PyTorch's modules, whose graph's parameters the backend freezes."""
    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 1024), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1024)).to(BF16).eval()
    x = matrix(130, 1024)
    assert_one_scale_by_the_backend(model, x)


def test_weights_that_were_quantized_elsewhere(no_grad: None) -> None:
    """Their numbers are promised to be those of the library that made them."""
    mlp, x = frozen(), matrix(M, K)
    q, scale = recipes.quantize(mlp.fc1_weight, Cast(E4M3, "row"), False)
    made = scaled_weight(q, scale, "rowwise", BF16)
    how: dict[str, Any] = {"normalization": "rms_norm", "recipe": "rowwise", "activation": "gelu"}
    how["norm_weight"] = mlp.layer_norm_weight
    with scales() as used:
        found = fn.norm_mlp(x, made, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias, **how)
        q, scale = recipes.quantize(mlp.fc2_weight, Cast(E4M3, "row"), False)
        made = scaled_weight(q, scale, "rowwise", BF16)
        other = fn.norm_mlp(x, mlp.fc1_weight, mlp.fc1_bias, made, mlp.fc2_bias, **how)
    assert torch.equal(found, other)
    assert not used
    fn.unfreeze(mlp)
    assert torch.equal(found, mlp(x))


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
