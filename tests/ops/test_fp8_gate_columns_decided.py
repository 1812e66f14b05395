"""Which gates in FP8 have hidden columns with powers of two, and which calls use them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from fp8_bounds import BF16, M, frozen, matrix
from fp8_columns import LOST, RECIPES, K, N, exact, folds, gated, large, made_of, spread
from fp8_products import LEAST, decibels
from torch import Tensor, nn

import fused_norm as fn
from fused_norm import recipes
from fused_norm.freeze import freeze_parameters
from fused_norm.recipes import E4M3, Cast

pytestmark = pytest.mark.usefixtures("no_grad")


def closed(mlp: fn.LayerNormMLP) -> None:
    """A column that its bound takes for large, and that is always 0."""
    spread(0.8)(mlp)
    mlp.fc1_weight[7], mlp.fc1_weight[N + 7] = 0, 0
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[7], mlp.fc1_bias[N + 7] = -1e5, 1e5


def infinite_out(mlp: fn.LayerNormMLP) -> None:
    spread(0.8)(mlp)
    mlp.fc2_weight[3, 4] = torch.inf


def not_a_number(mlp: fn.LayerNormMLP) -> None:
    spread(0.8)(mlp)
    mlp.fc1_weight[3, 4] = torch.nan


def not_a_bias(mlp: fn.LayerNormMLP) -> None:
    spread(0.8)(mlp)
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[-1] = torch.nan


def of_8_bits(mlp: fn.LayerNormMLP) -> None:
    """A second weight that loses nothing as it is."""
    spread(0.8)(mlp)
    q, _ = recipes.quantize(mlp.fc2_weight, Cast(E4M3, "row"), True)
    mlp.fc2_weight.copy_(q.float() / 448)
    mlp.fc2_weight[:, 0] = 1


OF_NO_USE = [large(1, 100), large(100, 100), large(1, 2.0**16, 64), closed, infinite_out]
OF_NO_USE += [not_a_number, not_a_bias, of_8_bits]


@pytest.mark.parametrize("change", OF_NO_USE)
def test_columns_that_are_of_no_use(change: Any) -> None:
    """Rows or the second weight would lose too much: each row has its own scale, as usual."""
    mlp, x = fn.freeze(gated("LayerNorm", change)), matrix(M, K)
    with folds() as used:
        found = [mlp(x) for _ in range(2)]
    assert used == [None, None]
    fn.unfreeze(mlp)
    for each in found:
        torch.testing.assert_close(mlp(x), each, rtol=0, atol=0, equal_nan=True)


def test_where_one_scale_serves_nothing_has_factors() -> None:
    for activation, count in itertools.product(("swiglu", "gelu"), (M, 20)):
        mlp = frozen(activation=activation, size=(K, N))
        with folds() as used:
            mlp(matrix(count, K))
        assert not any(used)
        assert made_of(mlp.fc2_weight) == ["fp8"]


def test_few_rows_use_the_same_weights() -> None:
    """So only one version of the second is kept; each row then has its own scale."""
    mlp, x = gated(), matrix(M, K)
    unfrozen = mlp(x[:20])
    fn.freeze(mlp)
    for rows in (x[:20], x, x[:1]):
        with folds() as used:
            found = mlp(rows)
        assert (used[0] or 0) > 0 or len(rows) < 129
        assert used[0] is not None
    assert made_of(mlp.fc2_weight) == ["fp8 in columns"]
    found = mlp(x[:20])
    assert not torch.equal(found, unfrozen)
    truth = exact(mlp, x[:20])
    assert decibels(found, truth) > decibels(unfrozen, truth) - LOST


def test_calls_without_factors() -> None:
    """Not frozen, frozen for a context or not together, few or many rows, other recipes."""
    mlp, x = gated(), matrix(M, K)
    expected = mlp(x)
    with folds() as used:
        mlp(x)
        with fn.frozen_parameters(mlp):
            assert all(torch.equal(mlp(x), expected) for _ in range(3))
        for parameter in mlp.parameters():
            others = [p for p in mlp.parameters() if p is not parameter]
            if parameter is mlp.fc2_bias:
                continue
            record = freeze_parameters(others)
            assert torch.equal(mlp(x), expected)
            record.thaw()
        fn.freeze(gated(recipe="blockwise"))(x)
        assert not any(used)
        used.clear()
        record = freeze_parameters(p for p in mlp.parameters() if p is not mlp.fc2_bias)
        assert not torch.equal(mlp(x), expected)
        assert all(used)
        record.thaw()
        assert torch.equal(mlp(x), expected)


@pytest.mark.parametrize("rows", [130, 20])
def test_compiled(rows: int) -> None:
    """A graph asks when it runs, so that it does what calls do, frozen or not."""
    mlp, x = gated(), matrix(rows, K)
    unfrozen = mlp(x)
    expected = fn.freeze(mlp)(x)
    assert not torch.equal(expected, unfrozen)
    for backend in ("aot_eager", "fused_norm"):
        torch.compiler.reset()
        compiled: Any = torch.compile(mlp, backend=backend, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(x), expected)
            fn.unfreeze(mlp)
            assert torch.equal(compiled(x), unfrozen)
            fn.freeze(mlp)


class GatedBlock(nn.Module):
    """An MLP as in LLaMA, with biases or without."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(1024)
        self.gate_proj = nn.Linear(1024, 1152, bias=bias)
        self.up_proj = nn.Linear(1024, 1152, bias=bias)
        self.down_proj = nn.Linear(1152, 1024, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        a = nn.functional.silu(self.gate_proj(z)) * self.up_proj(z)
        y: Tensor = x + self.down_proj(a)
        return y


@pytest.mark.parametrize(
    ("fp8", "bias"), [*zip(RECIPES, (False, True, False), strict=True), (RECIPES[0], True)]
)
def test_frozen_by_the_backend(fp8: str, bias: bool) -> None:
    torch.manual_seed(0)
    model, x = GatedBlock(bias).to(BF16).eval(), matrix(130, 1024)
    for layer in (model.gate_proj, model.up_proj):
        layer.weight *= torch.randn(1152, 1).mul(0.8).exp()
    torch.compiler.reset()
    compiled: Any = torch.compile(
        model, backend="fused_norm", options={"fp8": fp8, "freeze": True}, dynamic=False
    )
    with folds() as used:
        found = [compiled(x) for _ in range(2)]
    assert len(used) == 2
    assert all(used)
    assert torch.equal(*found)
    truth = copy.deepcopy(model).double()(x.double()) - x
    assert decibels(found[0].double() - x, truth) > 22
    kept = made_of(model.down_proj.weight)
    assert kept == ["fp8 in columns"]
    assert decibels(found[0], fn.unfreeze(model)(x)) > LEAST
