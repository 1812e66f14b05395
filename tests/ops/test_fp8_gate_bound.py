"""The scale of a gate's hidden rows in FP8, from the bound of a product of two products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_bounds import (
    BF16,
    NORMS,
    K,
    M,
    N,
    adversarial,
    assert_one_scale_by_the_backend,
    by_rows,
    exact_hidden,
    frozen,
    hidden_of,
    layer,
    matrix,
    scales,
    with_own_powers_of_two,
)
from fp8_products import SHORT, decibels
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.activations import GATES
from fused_norm.freeze import freeze_parameters

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("size", [(2048, 1024), (4096, 1024)])
def test_precision_of_a_gate_with_many_features(size: tuple[int, int]) -> None:
    """Its bound is over K / 2 typical values, which leaves the smallest ones fewer bits."""
    mlp, x = frozen(activation="swiglu", size=size), matrix(M, size[0])
    truth = exact_hidden(mlp, x)
    with scales() as used:
        ours, y = hidden_of(mlp, x), mlp(x)
    assert all(used)
    own, other = with_own_powers_of_two(mlp, x), by_rows(mlp, x)
    assert decibels(ours, truth) > decibels(own, truth) - 0.1
    mlp.recipe = None
    exact: Tensor = mlp.double()(x.double())
    assert decibels(y, exact) > decibels(other, exact) - SHORT / 2


def at_right_angles(_: fn.LayerNormMLP) -> None:
    """Nearly, as independent weights are."""


def aligned(mlp: fn.LayerNormMLP) -> None:
    mlp.fc1_weight[N:] = mlp.fc1_weight[:N] * 2


def far_gates(mlp: fn.LayerNormMLP) -> None:
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[:N] = 20


def far_from_gates(mlp: fn.LayerNormMLP) -> None:
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[N:] = 20


@pytest.mark.parametrize("change", [at_right_angles, aligned, far_gates, far_from_gates])
@pytest.mark.parametrize("normalization", NORMS)
def test_the_bound_is_near(normalization: str, change: Any) -> None:
    """Of some sizes of a weight, a power of two is just large enough."""
    largest = 0.0
    for i in range(8):
        mlp = layer(normalization, "reglu", change)
        mlp.fc1_weight *= 2 ** (i / 8)
        if mlp.layer_norm_bias is not None:
            mlp.layer_norm_bias.zero_()
        x = adversarial(mlp)
        with scales() as used:
            found = hidden_of(fn.freeze(mlp), x)
        assert found.isfinite().all()
        largest = max(largest, float(found.abs().max()) / (448 * used[0]))
    # Rounding to e4m3 adds 0.15 at most, and sums get 0.06; biases move the worst rows elsewhere.
    assert 0.6 < largest <= 1


def pair(mlp: fn.LayerNormMLP) -> list[list[Tensor]]:
    """Return the first layer's weights, and its biases, of a gate as two layers."""
    halves: list[list[Tensor]] = []
    for whole in (mlp.fc1_weight, mlp.fc1_bias):
        assert whole is not None
        halves.append([v.clone() for v in whole.chunk(2)])
    return halves


def call(mlp: fn.LayerNormMLP, x: Tensor, weights: Any, biases: Any) -> Tensor:
    how: dict[str, Any] = {"normalization": "layer_norm", "recipe": "rowwise", "eps": mlp.eps}
    how |= {"norm_weight": mlp.layer_norm_weight, "norm_bias": mlp.layer_norm_bias}
    second = (mlp.fc2_weight, mlp.fc2_bias)
    y: Tensor = fn.norm_mlp(x, weights, biases, *second, activation=mlp.activation, **how)
    return y


@pytest.mark.parametrize("activation", GATES.values())
def test_a_gate_of_two_layers(activation: str) -> None:
    """Its bound is that of one layer with both, and of all parameters of both."""
    mlp, x = frozen("LayerNorm", activation), matrix(M, K)
    weights, biases = pair(mlp)
    parts = [*weights, *biases]
    with scales() as used:
        expected = mlp(x)
        before = used.pop()
        assert before > 0
        call(mlp, x, weights, biases)
        each = [freeze_parameters([part]) for part in parts]
        call(mlp, x, weights, biases)
        # They were not frozen, or not together.
        assert used == [0, 0]
        for one in each:
            one.thaw()
        for part in (None, *parts):
            if part is not None:
                part *= 8 if part.dim() == 2 else 2048
            of_all = freeze_parameters([*mlp.parameters(), *parts])
            found = call(mlp, x, weights, biases)
            if part is None:
                assert torch.equal(found, expected)
                assert used[-1] == before
            else:
                assert used[-1] > before
            before = used[-1]
            of_all.thaw()


def test_weights_of_which_one_is_quantized_again() -> None:
    """A bound does not outlive either of them in 8 bits."""
    for again in (0, 1):
        mlp, x = frozen("LayerNorm", "swiglu"), matrix(M, K)
        weights, biases = pair(mlp)
        each = [freeze_parameters([weight]) for weight in weights]
        of_all = freeze_parameters([*mlp.parameters(), *weights, *biases])
        with scales() as used:
            call(mlp, x, weights, biases)
            # A write that goes unnoticed.
            weights[again].mul_(64)
            call(mlp, x, weights, biases)
            assert used[1] == used[0] > 0
            each[again].thaw()
            call(mlp, x, weights, biases)
            assert used[2] > used[1]
        of_all.thaw()


class GatedMLP(nn.Module):
    """An MLP as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(1024)
        self.gate_proj = nn.Linear(1024, 1152, bias=False)
        self.up_proj = nn.Linear(1024, 1152, bias=False)
        self.down_proj = nn.Linear(1152, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        a = nn.functional.silu(self.gate_proj(z)) * self.up_proj(z)
        y: Tensor = x + self.down_proj(a)
        return y


def test_frozen_by_the_backend() -> None:
    """The two layers of a model's gate."""
    torch.manual_seed(0)
    model, x = GatedMLP().to(BF16).eval(), matrix(130, 1024)
    assert_one_scale_by_the_backend(model, x)
