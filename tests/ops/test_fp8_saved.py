"""What a training step in FP8 saves for its backward, and how many kernels it launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from fp8_kernels import running
from torch import Tensor

import fused_norm as fn
from fused_norm import recipes
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


# Where columns or a tensor share a scale, one kernel computes maxima, another quantizes. The first
# computes the gradient before an activation as well, and a product the activation. In gw_hp, other
# scales are those of weights in the backward, where the rows stay in bfloat16.
MATRICES = {
    "rowwise": {"maxima": 6, "quantize_by_maxima": 6},
    "tensorwise": {"maxima": 6, "quantize_by_maxima": 6},
    "rowwise_with_gw_hp": {"quantize": 5, "maxima": 3, "quantize_by_maxima": 3},
    # The maxima are those of the gradient before an activation, which nothing reads.
    "blockwise": {"quantize": 6, "maxima": 1},
}
# Of rows and the weight that they are multiplied by, there is one of each.
LAUNCHES = {
    "rowwise": {"maxima": 4, "quantize_by_maxima": 4, "linear": 6},
    "tensorwise": {"maxima": 4, "quantize_by_maxima": 4, "linear": 6},
    "rowwise_with_gw_hp": MATRICES["rowwise_with_gw_hp"] | {"linear": 4},
    "blockwise": MATRICES["blockwise"] | {"linear": 4},
}


@pytest.fixture(params=["", "beside a frozen model"])
def other(request: pytest.FixtureRequest) -> Iterator[bool]:
    """What is frozen elsewhere, as a teacher is, changes nothing for a model that is trained."""
    model = fn.freeze(mlp("rowwise", "gelu").eval()) if request.param else None
    yield model is not None
    if model is not None:
        fn.unfreeze(model)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", LAUNCHES)
def test_launches_of_a_step(recipe: str, activation: str, other: bool, tmp_path: Path) -> None:
    """Quantizes z, both weights, a, and the gradients of h and y: none of them twice."""
    layer, x = mlp(recipe, activation), matrix(M, K).requires_grad_()
    with running(tmp_path) as ran:
        layer(x).backward(matrix(M, K, seed=2))
    assert ran.matrices == MATRICES[recipe]
    # Where any are frozen, Python looks for each weight first, and quantizes it on its own.
    are_alone = other and recipe in ("rowwise", "tensorwise")
    launches = LAUNCHES[recipe] | MATRICES[recipe] if are_alone else LAUNCHES[recipe]
    assert Counter(name for name, _ in ran) == launches


@pytest.mark.parametrize("recipe", LAUNCHES)
@pytest.mark.parametrize("wanted", ["all", "x", "weight"])
def test_what_is_saved(recipe: str, wanted: str, other: bool) -> None:
    x = matrix(M, K).requires_grad_(wanted != "weight")
    w = matrix(32, K, seed=1).requires_grad_(wanted != "x")
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scaled_linear(x, w, None, recipe=recipe)
    shapes = sorted(tuple(v.shape) for v in saved if v.dtype is E4M3)
    keeps_weight = recipe != "rowwise_with_gw_hp"
    keeps_rows = recipes.find(recipe).has_fp8_wgrad
    # The weight and the rows, lengthened to a multiple of 16.
    expected = [(K, 32)] * (keeps_weight and wanted != "weight")
    expected += [(K, 48)] * (keeps_rows and wanted != "x")
    assert shapes == expected
    if keeps_weight and keeps_rows and wanted == "all":
        # The weight itself, which takes no memory, so that a write to it is noticed.
        assert [v.data_ptr() for v in saved if v.dtype is BF16] == [w.data_ptr()]


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
    assert ran.matrices["quantize_by_maxima"] == 4 * by_maxima


RECIPES = list(recipes.RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["leaf", "view", "of two", "frozen"])
def test_a_weight_written_before_the_backward_is_an_error(recipe: str, form: str) -> None:
    """As PyTorch has it of a Linear layer: the gradient would be that of another weight."""
    x = matrix(M, 128).requires_grad_()
    own = torch.nn.Parameter(matrix(256, 128, seed=1))
    w = own[:128] if form == "view" else own
    holder = torch.nn.ParameterList([own])
    context = fn.frozen_parameters(holder) if form == "frozen" else nullcontext()
    with context:
        ys = [scaled_linear(x, w, None, recipe=recipe)]
        if form == "of two":
            ys = fn.norm_linear(x, (matrix(128, 128, seed=2).requires_grad_(), w), recipe=recipe)
    with torch.no_grad():
        own.mul_(2)
    loss = sum(y.float().sum() for y in ys)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, (x, own))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_autocast_made_is_not_saved(recipe: str) -> None:
    """It would take memory, and a write to the weight changes nothing that is multiplied."""
    x, w = torch.randn(M, 128).requires_grad_(), torch.randn(128, 128).requires_grad_()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", BF16), hooks:
        y = scaled_linear(x, w, None, recipe=recipe)
    of_weight = [v for v in saved if v.shape == w.shape and v.dtype is BF16]
    assert len(of_weight) == (recipe == "rowwise_with_gw_hp")
    with torch.no_grad():
        w.mul_(2)
    torch.autograd.grad(y.float().sum(), (x, w))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_gradients_are_those_of_the_rows_that_the_forward_read(recipe: str) -> None:
    x, w, dy = matrix(M, 128), matrix(128, 128, seed=1), matrix(M, 128, seed=2)
    results = []
    for changes in (False, True):
        own = w.clone().requires_grad_()
        rows = x.clone().requires_grad_()
        y = scaled_linear(rows, own, None, recipe=recipe)
        if changes:
            with torch.no_grad():
                rows.zero_()
        results.append(torch.autograd.grad(y, (rows, own), dy))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
