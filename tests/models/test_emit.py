"""Nodes that replace others, and what a site says about it."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from fused_norm.models.emit import Emitter
from fused_norm.models.sites import Site


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
