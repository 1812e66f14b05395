"""What a training step in FP8 saves for its backward, and how many kernels it launches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from fp8_kernels import running
from torch import Tensor

import fused_norm as fn
from fused_norm.ops.fp8 import scaled_linear
from fused_norm.recipes import E4M3

BF16 = torch.bfloat16
M, K, N = 40, 64, 128


def matrix(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape).bfloat16()


def mlp(recipe: str, activation: str) -> fn.LayerNormMLP:
    torch.manual_seed(1)
    return fn.LayerNormMLP(K, N, activation=activation, recipe=recipe, dtype=BF16)


# Where columns or a tensor share a scale, a kernel finds maxima and another quantizes. The first
# computes the gradient before an activation as well, and a product the activation. In gw_hp, other
# scales are those of weights in the backward, where the rows stay in bfloat16.
LAUNCHES = {
    "rowwise": {"maxima": 6, "quantize_by_maxima": 6, "linear": 6},
    "tensorwise": {"maxima": 6, "quantize_by_maxima": 6, "linear": 6},
    "rowwise_with_gw_hp": {"quantize": 5, "maxima": 3, "quantize_by_maxima": 3, "linear": 4},
}


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", LAUNCHES)
def test_launches_of_a_step(recipe: str, activation: str, tmp_path: Path) -> None:
    """Quantizes z, both weights, a, and the gradients of h and y: none of them twice."""
    layer, x = mlp(recipe, activation), matrix(M, K).requires_grad_()
    with running(tmp_path) as ran:
        layer(x).backward(matrix(M, K, seed=2))
    assert Counter(name for name, _ in ran) == LAUNCHES[recipe]


@pytest.mark.parametrize("recipe", LAUNCHES)
@pytest.mark.parametrize("wanted", ["all", "x", "weight"])
def test_what_is_saved(recipe: str, wanted: str) -> None:
    x = matrix(M, K).requires_grad_(wanted != "weight")
    w = matrix(32, K, seed=1).requires_grad_(wanted != "x")
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scaled_linear(x, w, None, recipe=recipe)
    shapes = sorted(tuple(v.shape) for v in saved if v.dtype is E4M3)
    is_kept = recipe != "rowwise_with_gw_hp"
    # The weight and the rows, lengthened to a multiple of 16.
    expected = [(K, 32)] * (wanted != "weight") + [(K, 48)] * (wanted != "x")
    assert shapes == expected * is_kept
    if is_kept and wanted == "all":
        assert not any(v.dtype is BF16 for v in saved)


@pytest.mark.parametrize("recipe", LAUNCHES)
def test_no_gradient_saves_and_transposes_nothing(recipe: str, tmp_path: Path) -> None:
    x, w = matrix(M, K), matrix(48, K, seed=1)
    with running(tmp_path) as ran:
        for x_needs, w_needs, recorded in ((False, False, True), (True, True, False)):
            x.requires_grad_(x_needs)
            w.requires_grad_(w_needs)
            with torch.set_grad_enabled(recorded):
                scaled_linear(x, w, None, recipe=recipe)
    by_maxima = recipe == "tensorwise"
    assert Counter(name for name, _ in ran)["quantize_by_maxima"] == 4 * by_maxima


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_gradients_are_those_of_the_weight_that_the_forward_read(recipe: str) -> None:
    x, w, dy = matrix(M, 128), matrix(128, 128, seed=1), matrix(M, 128, seed=2)
    results = []
    for changes in (False, True):
        own = w.clone().requires_grad_()
        rows = x.clone().requires_grad_()
        y = scaled_linear(rows, own, None, recipe=recipe)
        if changes:
            with torch.no_grad():
                own.zero_()
                rows.zero_()
        results.append(torch.autograd.grad(y, (rows, own), dy))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
