"""Calls in FP8 whose output is read in parts take their gradients as they are: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_output_parts
import torch
from compiling import ITS_OWN_WARNINGS
from fp8_kernels import running
from test_output_parts import HEAD, SPLIT, WHOLE, compiled, parameters, step
from torch import Tensor
from torch.fx import GraphModule

from fused_norm.models import output_parts, precision
from fused_norm.ops import normed_linears

pytestmark = ITS_OWN_WARNINGS
RECIPES = pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
RUNS = pytest.mark.parametrize("run", SPLIT, ids=lambda run: run.__name__)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Return what decides whether calls are split; at first they are, of any size."""
    monkeypatch.setattr(precision, "SMALLEST", 16)

    def decide(splits: bool) -> None:
        monkeypatch.setattr(output_parts, "splits_outputs", lambda *_: splits)
        torch.compiler.reset()

    decide(True)
    yield decide
    torch.compiler.reset()


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.stride()) == (other.shape, other.stride())
            assert torch.equal(one, other)


@RECIPES
@RUNS
def test_same_bits(run: Function, recipe: str, splits: Callable[[bool], None]) -> None:
    x, p = parameters(torch.bfloat16)
    call, parts = compiled(run, fp8=recipe)
    found = step(call, x, p)
    assert set(parts) == {SPLIT[run]}
    splits(False)
    call, parts = compiled(run, fp8=recipe)
    assert_same(found, step(call, x, p))
    assert not parts


@RECIPES
@pytest.mark.parametrize("is_normed", [False, True])
def test_by_kernels(
    recipe: str,
    is_normed: bool,
    splits: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whether the norm's rows are in 8 bits alone or not."""
    monkeypatch.setattr(normed_linears, "serves", lambda *_: is_normed)
    x, p = parameters(torch.bfloat16)
    results, matrices = [], []
    for is_split in (True, False):
        splits(is_split)
        call, _ = compiled(test_output_parts.chunked, fp8=recipe)
        with running(tmp_path) as ran:
            results.append(step(call, x, p))
        matrices.append(ran.matrices["quantize_by_maxima"])
    assert_same(*results)
    # Two parts more.
    assert matrices[0] == matrices[1] + 2


def backward_graph(run: Function, recipe: str) -> GraphModule:
    """Return the graph of a compiled function's gradients."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[GraphModule] = []

    def keep(module: GraphModule, _: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module.forward)

    x, p = parameters(torch.bfloat16)
    # CPUs have no gradient of a norm from statistics in float32.
    table = select_decomp_table()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=table)
    call, _ = compiled(run, backend, fp8=recipe)
    step(call, x, p)
    return graphs[-1]


@pytest.mark.parametrize("is_normed", [False, True])
@RUNS
def test_nothing_is_concatenated(
    run: Function,
    is_normed: bool,
    splits: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(normed_linears, "serves", lambda *_: is_normed)
    assert joined(backward_graph(run, "rowwise")) == (set(), SPLIT[run])
    if run is test_output_parts.chunked:
        splits(False)
        assert joined(backward_graph(run, "rowwise")) == ({"cat"}, 1)


def joined(graph: GraphModule) -> tuple[set[str], int]:
    """Return which ops make tensors as large as the output, and how many gradients an op takes."""
    backward = torch.ops.fused_norm.fp8_layers_backward.default
    calls = [node for node in graph.graph.nodes if node.target is backward]
    dys = [dy.meta["val"] for dy in calls[0].args[4]]
    count = sum(dy.numel() for dy in dys)
    found = set()
    for node in graph.graph.nodes:
        made = node.meta.get("val")
        is_op = isinstance(node.target, torch._ops.OpOverload)
        if is_op and isinstance(made, Tensor) and made.numel() == count:
            found.add(str(node.target).split(".")[1])
    views = {"view", "t", "permute", "transpose", "_unsafe_view", "reshape"}
    return found - views, len(dys)


@pytest.mark.parametrize("run", WHOLE, ids=lambda run: run.__name__)
def test_whole(run: Function, splits: Callable[[bool], None]) -> None:
    x, p = parameters(torch.bfloat16)
    call, parts = compiled(run, fp8="rowwise")
    found = step(call, x, p)
    assert not parts
    splits(False)
    call, _ = compiled(run, fp8="rowwise")
    assert_same(found, step(call, x, p))


def test_multiples() -> None:
    """A part has a multiple of 16 columns, not of 8."""
    x, p = parameters(torch.bfloat16)
    call, parts = compiled(of_odd_parts, fp8="rowwise")
    step(call, x, p)
    assert not parts
    call, parts = compiled(of_odd_parts)
    step(call, x, p)
    assert parts == [2]


def of_odd_parts(x, p):
    q, k = test_output_parts.projected(x, p).split((3 * HEAD + 8, 3 * HEAD - 8), -1)
    return q.transpose(1, 2) @ k
