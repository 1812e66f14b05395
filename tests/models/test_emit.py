"""Nodes that replace others, and what a site says about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fused_norm.models.calls import Left
from fused_norm.models.emit import Emitter
from fused_norm.models.sites import Site
from fused_norm.models.values import value


def added(graph: Graph, function: object, *args: Node | float) -> Node:
    node = graph.call_function(function, args)  # type: ignore[arg-type]
    node.meta["example_value"] = torch.empty(4, 8)
    return node


def test_a_call_replaces_nodes_and_its_site_says_what_that_saves() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(4, 8)
    kept = added(graph, torch.neg, x)
    between = added(graph, torch.add, kept, 1.0)
    old = added(graph, torch.mul, between, 2.0)
    graph.output((old, kept))
    emitter = Emitter(graph)
    with graph.inserting_before(old):
        new = emitter.emit(old, torch.sub, x, 3.0)
    site = Site("layer", "norm").describe(torch.empty(4, 8))
    emitter.replace(old, new, {kept, between, old}, [new], site)
    graph.lint()
    # What something else reads stays.
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        torch.neg,
        torch.sub,
    ]
    assert (site.shape, site.dtype, site.fused) == (("4", "8"), "float32", True)
    assert (site.ops_before, site.ops_after) == (3, 1)
    assert site.bytes_saved == (3 - 1) * 4 * 8 * 4


def emitted_after(
    function: Callable[..., Tensor],
    emit: Callable[[Emitter, Node], Node],
    *inputs: Tensor,
    dynamic: bool | None = None,
) -> Any:
    """Return the value of a node that is emitted after a graph's last one, and that one's own."""
    found: list[Any] = []

    def look(module: GraphModule, inputs: list[Tensor]) -> GraphModule:
        (last,) = module.graph.output_node().all_input_nodes
        emitter = Emitter(module.graph)
        with module.graph.inserting_before(module.graph.output_node()):
            found.extend([value(emit(emitter, last)), value(last)])
        emitter.forget()
        return module

    torch._dynamo.reset()
    torch.compile(function, backend=look, fullgraph=True, dynamic=dynamic)(*inputs)
    return found


@pytest.fixture
def x() -> Iterator[Tensor]:
    yield torch.randn(4, 8, requires_grad=True)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("target", "arguments", "is_differentiable"),
    [
        *((torch.mul, (2.0,), True), ("view", (2, 16), True), ("contiguous", (), True)),
        *(("to", (torch.complex64,), True), (torch.detach, (), False)),
        *((torch.argmax, (), False), (torch.gt, (0.0,), False), (torch.zeros_like, (), False)),
    ],
)
def test_a_new_value_requires_a_gradient_as_in_eager_execution(
    x: Tensor, target: Any, arguments: tuple[Any, ...], is_differentiable: bool
) -> None:
    """Regression: none did, so a later pass took its gradient for unwanted and detached it."""

    def emit(emitter: Emitter, last: Node) -> Node:
        return emitter.emit(last, target, last, *arguments)

    new, _ = emitted_after(torch.neg, emit, x)
    assert new.requires_grad == is_differentiable
    new, _ = emitted_after(torch.neg, emit, x.detach())
    assert not new.requires_grad


def test_all_parts_of_a_new_value_require_gradients(x: Tensor) -> None:
    parts, _ = emitted_after(torch.neg, lambda e, last: e.emit(last, torch.chunk, last, 2), x)
    assert len(parts) == 2
    assert all(part.requires_grad for part in parts)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_new_value_is_under_the_modes_of_its_place(x: Tensor, mode: Any) -> None:
    def inside(x: Tensor) -> Tensor:
        with mode():
            return x * 2

    def behind(x: Tensor) -> Tensor:
        with mode():
            y = x * 2
        return x + y

    def emit(emitter: Emitter, last: Node) -> Node:
        return emitter.emit(last, torch.add, last.all_input_nodes[0], 1.0)

    for function, is_recorded in ((inside, False), (behind, True)):
        new, own = emitted_after(function, emit, x)
        assert new.requires_grad == own.requires_grad == is_recorded
    with torch.no_grad():
        new, _ = emitted_after(torch.neg, emit, x)
        assert not new.requires_grad


def scaled(x: Tensor, gamma: Tensor | float, weight: Tensor) -> Tensor:
    """Return a layer of an RMSNorm, of rows whose number of features is read before."""
    x = x.view(-1, x.shape[-1])
    rows = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return F.linear(rows * gamma, weight)


def by_a_number(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    return scaled(x, 2.0, weight)


def of_doubled(x: Tensor, gamma: Tensor, weight: Tensor) -> Tensor:
    return scaled(torch.cat((x, x), -1), gamma, torch.cat((weight, weight), -1))


@pytest.mark.parametrize("function", [scaled, by_a_number, of_doubled])
def test_a_dynamic_size_is_taken_from_a_node(function: Callable[..., Tensor]) -> None:
    """Regression: the graph read a name that its code had already freed, or a raw SymInt."""
    compiled, sites = with_sites(function, dynamic=True, small=True)
    for rows, features in (((2, 5), 16), ((3, 4), 24)):
        inputs = torch.randn(*rows, features), torch.randn(1), torch.randn(30, features)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert [site.fused for site in sites] == [True]


def test_a_dynamic_size_that_no_input_has(x: Tensor) -> None:
    """Such a site is left. What a new node reads has the size as well."""
    left: list[str] = []

    def emit(emitter: Emitter, last: Node) -> Node:
        nodes = list(emitter.graph.nodes)
        rows, features = value(last).shape
        with pytest.raises(Left) as raised:
            emitter.emit(last, torch.ones, (rows, features + 1))
        left.append(str(raised.value))
        emitter.forget()
        assert list(emitter.graph.nodes) == nodes
        return emitter.emit(last, torch.Tensor.new_zeros, last, (rows, features))

    def function(x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)

    new, own = emitted_after(function, emit, x, dynamic=True)
    assert new.shape == own.shape
    assert len(left) == 1
    assert left[0].startswith("no input has the dynamic size ")
