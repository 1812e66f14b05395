"""What a compiled step does with the gradients that the head's forward has left.

Nothing for a loss's gradient of 1 in the graph; one pass, in place, for one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph

import fused_norm as fn

V, K, M = 503, 16, 18
NEW = f"empty_strided_cpu(({V}, {K})"
# Ops that leave the gradient of the weight where it is.
_GIVEN = ("linear_cross_entropy", "getitem")


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    torch.compiler.reset()
    with fresh_cache():
        yield
    torch.compiler.reset()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(M, K, requires_grad=True), torch.randn(V, K, requires_grad=True)
    return x, weight, torch.randint(0, V, (M,))


def ops_of_weight_s_gradient(step: Callable[[], Any]) -> list[str]:
    """Return the ops of compiled graphs whose result is as large as the weight, in order."""
    found: list[str] = []

    def look(graph: Graph) -> None:
        for node in graph.nodes:
            result = node.meta.get("val")
            is_large = isinstance(result, Tensor) and result.shape == (V, K)
            name = getattr(node.target, "__name__", "").split(".")[0]
            if node.op == "call_function" and is_large and name not in _GIVEN:
                found.append(name)

    with config.patch(post_grad_custom_post_pass=look):
        step()
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_of_one_in_the_graph_multiplies_nothing(reduction: str) -> None:
    x, weight, target = inputs()

    def loss(x: Tensor, weight: Tensor) -> Any:
        return fn.linear_cross_entropy(x, weight, target, reduction=reduction)

    step = torch.compile(torch.func.grad(loss, (0, 1)))
    found: list[Any] = []
    ops = ops_of_weight_s_gradient(lambda: found.extend(step(x.detach(), weight.detach())))
    assert ops == []
    exact = F.cross_entropy(F.linear(x, weight), target, reduction=reduction)
    torch.testing.assert_close(tuple(found), torch.autograd.grad(exact, (x, weight)))


@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_a_gradient_from_outside_multiplies_once_in_place(upstream: float) -> None:
    x, weight, target = inputs()
    compiled = torch.compile(lambda x, w: fn.linear_cross_entropy(x, w, target))
    step: Any = lambda: (compiled(x, weight) * upstream).backward()  # noqa: E731
    codes: list[str] = []
    ops = ops_of_weight_s_gradient(lambda: codes.extend(run_and_get_code(step)[1]))
    assert ops == ["mul"]
    # What the forward has saved is written, and no second tensor of that size made.
    assert f"({V}, {K})" in codes[-1]
    assert NEW not in codes[-1]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), tuple(upstream * g for g in exact))


def test_a_tied_embedding_s_sum_takes_no_more_memory() -> None:
    _, weight, target = inputs()

    def loss(weight: Tensor) -> Any:
        return fn.linear_cross_entropy(F.embedding(target, weight), weight, target)

    compiled = torch.compile(loss)
    _, codes = run_and_get_code(lambda: (compiled(weight) * 0.25).backward())
    exact = F.cross_entropy(F.linear(F.embedding(target, weight), weight), target)
    torch.testing.assert_close(weight.grad, torch.autograd.grad(0.25 * exact, weight)[0])
    # Of the embedding's gradient alone: its sum with the head's replaces the latter.
    assert codes[-1].count(NEW) == 1
