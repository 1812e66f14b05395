"""Matrices that the chain has quantized together: by how many launches, and in which memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import matrix
from fp8_kernels import Ran, running
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fused_norm as fn
from fused_norm.call.record import MOST_MATRICES

BF16 = torch.bfloat16
M, K = 40, 64
OPS = torch.ops.fused_norm
RECIPES = pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])


def step(recipe: str, sizes: list[int]) -> list[Tensor]:
    """Return results and gradients of layers on the same rows."""
    x = matrix(M, K).requires_grad_()
    weights = [(matrix(n, K, seed=i) / 8).requires_grad_() for i, n in enumerate(sizes)]
    ys = fn.norm_linear(x, tuple(weights), None, normalization="rms_norm", recipe=recipe)
    dys = [matrix(*y.shape, seed=i) for i, y in enumerate(ys)]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, (x, *weights), dys)]


@RECIPES
@pytest.mark.parametrize("count", [2, 3, MOST_MATRICES - 1, MOST_MATRICES, 2 * MOST_MATRICES])
def test_layers_of_the_same_rows(recipe: str, count: int, tmp_path: Path) -> None:
    sizes = [16 * (1 + i % 3) for i in range(count)]
    expected = step(recipe, sizes)
    with running(tmp_path) as ran:
        found = step(recipe, sizes)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    launches = Counter(name for name, _ in ran)
    # The rows and the weights; and the gradients.
    each = -(-(1 + count) // MOST_MATRICES) + -(-count // MOST_MATRICES)
    assert launches["maxima"] == launches["quantize_by_maxima"] == each
    assert ran.matrices == {"maxima": 1 + 2 * count, "quantize_by_maxima": 1 + 2 * count}


def layers(scalings: tuple[str, str], activation: str, count: int, leaves: bool) -> list[Any]:
    """Return arguments of `fp8_layers`."""
    weights = [matrix(48, K, seed=i) / 8 for i in range(count)]
    none = [None] * count
    how = (*scalings, True, BF16, False, activation, bool(activation), True, True)
    return [matrix(M, K), weights, none, none, *how, None, None, leaves, None]


def test_each_cast_has_launches_of_its_own(tmp_path: Path) -> None:
    for scalings, launches in {
        ("row", "row"): 1,
        ("tensor", "tensor"): 1,
        ("row", "tensor"): 2,
    }.items():
        given = layers(scalings, "", 3, False)
        expected = OPS.fp8_layers_by_python(*given)
        with running(tmp_path) as ran:
            found = OPS.fp8_layers(*given)
        assert Counter(name for name, _ in ran)["maxima"] == launches
        assert ran.matrices["maxima"] == 4
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.float(), other.float())


def zeroed(call: Any) -> int:
    """Return how often a call zeroes memory."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(e.count for e in profiler.key_averages() if e.key == "aten::zero_")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("activation", "count"), [("", 3), ("gelu", 1), ("swiglu", 2)])
def test_an_op_zeroes_memory_once(
    scaling: str, activation: str, count: int, tmp_path: Path
) -> None:
    given = layers((scaling, scaling), activation, count, bool(activation))
    with running(tmp_path) as ran:
        # The stand-in zeroes what it transposes to.
        others = zeroed(lambda: OPS.fp8_layers(*given)) - zeros_of(ran)
        assert others == 1
    assert len(ran) == 3


def zeros_of(ran: Ran) -> int:
    return ran.matrices["quantize_by_maxima"]


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("activation", "count"), [("gelu", 1), ("swiglu", 2)])
def test_maxima_that_an_op_leaves(
    scaling: str, activation: str, count: int, tmp_path: Path
) -> None:
    """They begin where their memory does, as all results of an op, whatever else was in it."""
    given = layers((scaling, scaling), activation, count, True)
    with running(tmp_path):
        y, *_, maxima = OPS.fp8_layers(*given)
    assert maxima.storage_offset() == 0
    assert maxima.is_contiguous()
    numbers = maxima.view(torch.float32)
    size = y.float().abs()
    most = (
        size.amax().reshape(1) if scaling == "tensor" else torch.cat([size.amax(0), size.amax(1)])
    )
    assert torch.equal(numbers[: len(most)], most)
    assert not numbers[len(most) :].any()
