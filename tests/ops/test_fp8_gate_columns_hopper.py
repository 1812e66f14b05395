"""Hopper's kernels for a gate whose hidden columns have powers of two in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes, replayed
from fp8_bounds import NORMS, adversarial, hidden_of, matrix
from fp8_columns import (
    LOST,
    K,
    N,
    assert_as_precise,
    exact,
    folds,
    gated,
    large,
    made_of,
    spread,
    tails,
    without_columns,
)
from fp8_products import decibels
from test_fp8_blocks import on_hopper, ran
from test_fp8_bound_hopper import stays
from torch import Tensor

import fused_norm as fn
from fused_norm.call import frozen
from fused_norm.ops.hidden_scale import Columns

pytestmark = [
    *on_hopper,
    pytest.mark.usefixtures("no_grad"),
    # What is compared with.
    pytest.mark.filterwarnings("ignore:fused_norm has no kernels for torch.float64:UserWarning"),
]


@pytest.mark.parametrize("change", [spread(0.7), spread(1), large(1, 30, 64), tails])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_precision(recipe: str, normalization: str, change: Any) -> None:
    how: dict[str, Any] = {"recipe": recipe, "size": (1024, 2816), "device": "cuda"}
    mlp, x = fn.freeze(gated(normalization, change, **how)), matrix(2000, 1024).cuda()
    assert_as_precise(mlp, x)
    assert_as_precise(mlp, x, residual_out=x)


def test_a_size_of_llama() -> None:
    mlp = gated(change=spread(0.2), size=(4096, 14336), bias=False, device="cuda")
    fn.freeze(mlp)
    x = matrix(1024, 4096).cuda()
    mlp(x)
    found, names = ran(lambda: mlp(x))
    assert stays(names), names
    truth = exact(mlp, x)
    assert decibels(found, truth) > decibels(without_columns(mlp, x), truth) - LOST


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("rows", [1, 16, 128, 129, 301, 4096])
@pytest.mark.parametrize("bias", [False, True])
def test_kernels(recipe: str, rows: int, bias: bool) -> None:
    """Of few rows, each has its own scale, and the same weights."""
    mlp, x = gated(recipe=recipe, bias=bias, device="cuda"), matrix(rows, K).cuda()
    fn.freeze(mlp)
    with folds() as used:
        mlp(x)
        found, names = ran(lambda: mlp(x))
    assert used == [used[0]] * 2
    assert used[0] is not None
    assert (used[0] > 0) == stays(names) == (rows > 128), names
    assert all(torch.equal(mlp(x), found) for _ in range(3))
    assert made_of(mlp.fc2_weight) == ["fp8 in columns"]
    truth = exact(mlp, x)
    # A few rows are a few roundings.
    short = LOST if rows > 1000 else 2.5 * LOST
    assert decibels(found, truth) > decibels(without_columns(mlp, x), truth) - short


@pytest.mark.parametrize("normalization", NORMS)
def test_no_row_exceeds_the_bound(normalization: str) -> None:
    mlp = gated(normalization, spread(0.7), (1024, 384), activation="reglu", device="cuda")
    with folds() as used:
        found = hidden_of(fn.freeze(mlp), adversarial(mlp, 768))
    assert used[0]
    assert found.isfinite().all()
    assert 0.2 < float(found.abs().max()) / (448 * used[0]) <= 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "fused_norm"])
@pytest.mark.parametrize("rows", [16, 512])
def test_compiled(backend: str, rows: int) -> None:
    mlp, x = fn.freeze(gated(device="cuda")), matrix(rows, K).cuda()
    expected = mlp(x)
    torch.compiler.reset()
    compiled: Any = torch.compile(mlp, backend=backend, fullgraph=True)
    found, names = ran(lambda: [compiled(x) for _ in range(2)][1])
    assert stays(names) == (rows > 128), names
    assert torch.equal(found, expected)
    unfrozen = fn.unfreeze(mlp)(x)
    assert torch.equal(compiled(x), unfrozen)


def captured(mlp: fn.LayerNormMLP, x: Tensor) -> Tensor:
    """Return what a CUDA graph computes that captures a call, the first of these parameters."""
    return replayed(mlp, x, first=gated(device="cuda"))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("rows", [16, 300])
def test_offloaded_and_captured(offload: bool, rows: int) -> None:
    """One call before the graph is enough, also if values then leave."""
    mlp, x = gated(device="cuda"), matrix(rows, K).cuda()
    expected = fn.freeze(mlp)(x)
    fn.freeze(mlp, offload=offload)
    assert torch.equal(mlp(x), expected)
    assert torch.equal(captured(mlp, x), expected)
    assert all(torch.equal(mlp(x), expected) for _ in range(2))


def test_a_graph_that_captures_the_first_call() -> None:
    """It may not wait for a bound, so nothing has factors in it."""
    mlp, x = gated(device="cuda"), matrix(300, K).cuda()
    expected = mlp(x)
    fn.freeze(mlp)
    assert torch.equal(captured(mlp, x), expected)
    assert not torch.equal(mlp(x), expected)


@pytest.mark.usefixtures("back_to_back")
def test_graphs_and_rows_written_just_before() -> None:
    """No kernel starts with what an earlier one has still to write."""
    mlp = fn.freeze(gated(change=spread(0.9), device="cuda"))
    assert_same_in_graphs_and_after_writes(mlp, matrix(2048, K).cuda())


def columns_of(mlp: fn.LayerNormMLP) -> Columns:
    """Return what has been found for a frozen MLP."""
    (record,) = frozen.of([mlp.fc1_weight])
    (found,) = (v for _, v in record._found.values() if isinstance(v, Columns))
    return found


@pytest.mark.parametrize("change", [spread(0.8), spread(1), large(1, 30, 64)])
@pytest.mark.parametrize("normalization", NORMS)
def test_the_same_factors_as_on_a_cpu(normalization: str, change: Any) -> None:
    found = list[Columns]()
    for device in ("cpu", "cuda"):
        mlp = fn.freeze(gated(normalization, change, (K, N)).to(device))
        mlp(matrix(130, K).to(device))
        found.append(columns_of(mlp))
    assert found[0].scale == found[1].scale
    # Sums in another order may move a bound across a power of two.
    assert (found[0].factors != found[1].factors).sum() <= 2
