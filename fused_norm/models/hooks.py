"""Tensors on which a graph registers hooks: each gets a node of its own, which all readers read.

A hook is given the whole gradient of its tensor, also from readers before it was registered. Calls
read other tensors of the same values, and return such: what reaches a tensor through these would
pass by its hooks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow
from fused_norm.models.values import are_same, value
from fused_norm.models.writes import written


def keep_hooked(graph: Graph) -> bool:
    """Give tensors with hooks nodes that no pass looks through; return whether all can have one.

    Args:
        graph: The graph.
    """
    hooks = [node for node in graph.nodes if _is_hook(node)]
    if not hooks:
        return True
    emitter = Emitter(graph)
    # A hook's own result is its tensor.
    hooked = dict.fromkeys(node.args[0] for node in hooks if not _is_hook(node.args[0]))
    if not all(_is_apart(node, hooks, emitter.flow) for node in hooked):
        return False
    for node in hooked:
        with graph.inserting_after(node):
            own = emitter.emit(node, torch.ops.aten.alias.default, node)
        node.replace_all_uses_with(own, lambda user, own=own: user is not own)
    return True


def _is_hook(node: Node) -> bool:
    # With compiled autograd, a function of Dynamo's registers them.
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in ("register_hook", "_register_hook_trampoline")


def _is_apart(node: Node, hooks: list[Node], flow: Flow) -> bool:
    """Return whether a view may replace a node's tensor, which no other node may have.

    After a write, and where its caller writes it, hooks of a view are not called.
    """
    end = next(each for each in reversed(flow.graph.nodes) if each.op == "output")
    return (
        node.op.startswith("call_")
        and value(node).requires_grad
        and not written(node)
        and not any(_may_be(source, node, flow) for source in node.all_input_nodes)
        and not flow.is_written([node], node, but=hooks)
        and not flow.reach([node]) & flow.reach(end.all_input_nodes)
    )


def _may_be(source: Node, node: Node, flow: Flow) -> bool:
    """Return whether a node's result may be the very tensor that it is given: of a cast, say."""
    given, found = value(source), value(node)
    return (
        isinstance(given, Tensor)
        and bool(flow.reach([source]) & flow.reach([node]))
        and given.dtype is found.dtype
        and are_same(given.shape, found.shape)
    )
