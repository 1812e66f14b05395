"""When frozen parameters give an MLP's hidden rows in FP8 one scale, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_bounds import BF16, K, M, N, assert_one_scale_by_the_backend, frozen, layer, matrix, scales

import fused_norm as fn
from fused_norm import recipes
from fused_norm.freeze import freeze_parameters
from fused_norm.ops.quantized import scaled_weight
from fused_norm.recipes import E4M3, Cast

pytestmark = pytest.mark.usefixtures("no_grad")


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
def test_bounds_that_are_of_no_use(activation: str, change: Any) -> None:
    """Typical values would have too few bits: each row has its own scale, as usual."""
    mlp, x = frozen(activation=activation, change=change), matrix(M, K)
    with scales() as used:
        found = mlp(x)
    assert used == [0.0]
    fn.unfreeze(mlp)
    torch.testing.assert_close(mlp(x), found, rtol=0, atol=0, equal_nan=True)


def test_calls_without_a_bound() -> None:
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
def test_no_bound_is_stale(name: str, way: str, activation: str) -> None:
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


def test_other_records_of_the_same_parameters() -> None:
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


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_offloaded(activation: str) -> None:
    x = matrix(M, K)
    expected = frozen(activation=activation)(x)
    mlp = fn.freeze(layer(activation=activation), offload=True)
    with scales() as used:
        assert all(torch.equal(mlp(x), expected) for _ in range(3))
    assert used[0] > 0
    assert len(set(used)) == 1


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_compiled(activation: str) -> None:
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


def test_frozen_by_the_backend() -> None:
    """A model of PyTorch's modules, whose graph's parameters the backend freezes."""
    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 1024), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1024)).to(BF16).eval()
    x = matrix(130, 1024)
    assert_one_scale_by_the_backend(model, x)


def test_weights_that_were_quantized_elsewhere() -> None:
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
