"""Adds nodes to a graph, and computes their fake tensors by running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import SymInt
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from fused_norm.models.calls import Left
from fused_norm.models.costs import bytes_written, count_ops
from fused_norm.models.flow import Flow
from fused_norm.models.sites import Site
from fused_norm.models.values import are_same, computed, is_tensor, shape, value

_KEPT = ("nn_module_stack", "source_fn_stack", "stack_trace")


def _same(saved: Any) -> Any:
    return saved


class Emitter:
    """Adds nodes at a graph's insertion point.

    Args:
        graph: The graph.

    Attributes:
        graph: The graph.
        flow: What is known of the graph, including the new nodes.
        made: The new nodes, in the order in which they were added.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.flow = graph, Flow(graph)
        self.made: list[Node] = []

    def emit(
        self, like: Node, target: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Node:
        """Return a new node.

        Args:
            like: A node under the same modes, whose module the new one is attributed to.
            target: A function, or the name of a method.
            args: Its arguments. A dynamic size, which a graph only takes from a node, may be among
                them as traced.
            kwargs: Its arguments by name.

        Raises:
            Left: If no node holds a dynamic size.
            RuntimeError: Like the target for such arguments; so are other errors.
        """
        reads = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Node)]
        args, kwargs = map_aggregate(
            (args, kwargs),
            lambda v: self._holder(v, reads, like) if isinstance(v, SymInt) else v,
        )
        if isinstance(target, str):
            node = self.graph.call_method(target, args, kwargs)
        else:
            node = self.graph.call_function(target, args, kwargs)
        self.made.append(node)
        node.meta = {name: like.meta[name] for name in _KEPT if name in like.meta}
        self.flow.add(node, like)
        self.trace(node, like)
        return node

    def _holder(self, size: SymInt, reads: Iterable[Node], like: Node) -> Node:
        """Return a node before the insertion point that has a size as its value, perhaps a new one.

        Only inputs and what the new node reads anyway are asked for their size: another tensor may
        be one that a call is about to replace.
        """
        here = node = self.graph.call_method("size")
        before = list[Node]()
        while (node := node.prev).op != "root":
            before.append(node)
        before.reverse()
        self.graph.erase_node(here)
        for node in before:
            if isinstance(value(node), SymInt) and are_same(value(node), size):
                return node
        for node in [*reads, *(node for node in before if node.op == "placeholder")]:
            sizes = shape(node) if is_tensor(node) else ()
            for dim, each in enumerate(sizes):
                if are_same(each, size):
                    return self.emit(like, "size", node, dim)
        raise Left(f"no input has the dynamic size {size}")

    def trace(self, node: Node, like: Node) -> None:
        """Run a node on the fake values of its arguments, and keep its own.

        It requires a gradient if it would in eager execution: passes detach what does not.

        Args:
            node: The node.
            like: A node under the same modes that was traced.

        Raises:
            RuntimeError: Like the target for such arguments; so are other errors.
        """
        key = "val" if "val" in like.meta else "example_value"
        mode = getattr(value(like), "fake_mode", None)
        records = self.flow.records_gradients(like)
        # Some ops run on symbolic sizes only with the dispatcher that Dynamo uses.
        with (
            torch.set_grad_enabled(records),
            self.flow.autocast(like),
            mode or nullcontext(),
            enable_python_dispatcher(),
            # A checkpoint in whose forward the model is first compiled counts what ops save.
            torch.autograd.graph.saved_tensors_hooks(_same, _same),
        ):
            node.meta[key] = computed(node, value)

    def replace(
        self, old: Node, new: Node, inner: Iterable[Node], written: Iterable[Node], site: Site
    ) -> None:
        """Replace nodes by a call, and note in the site what that saves.

        Args:
            old: The result that is replaced.
            new: The call's result.
            inner: All nodes that the call replaces.
            written: The tensors that the call writes instead.
            site: What became of them.
        """
        old.replace_all_uses_with(new)
        gone = sorted(inner, reverse=True)
        site.fused, site.ops_before, site.ops_after = True, count_ops(gone), 1
        site.bytes_saved = bytes_written(gone) - bytes_written(written)
        for node in gone:
            if not node.users:
                self.graph.erase_node(node)

    def forget(self, count: int = 0) -> None:
        """Remove new nodes from the graph.

        Args:
            count: How many of them stay.
        """
        while len(self.made) > count:
            self.graph.erase_node(self.made.pop())
