"""The order of a graph: what writes where, which modes hold, what shares memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node

from fused_norm.models.forms import form, written

# Their results may share memory with their first argument.
_ALIASES = {
    *("view", "expand", "permute", "transpose", "t", "getitem", "select", "slice"),
    *("chunk", "split", "contiguous", "cast", "dropout", "from_local", "redistribute", "to_local"),
}
_OTHER_ALIASES = {
    *("unbind", "narrow", "movedim", "detach", "real", "imag", "view_as_complex", "alias"),
    *("view_as_real", "tensor_split", "diagonal", "unfold", "as_strided"),
}


class Flow:
    """What is known of a graph beside its nodes.

    Nodes that are put into the graph later write nowhere, and run under the modes of the place
    that they are put at.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._roots: dict[Node, Node] = {}
        self._autocasts: dict[Node, tuple[Node, ...]] = {}
        self._grad_modes: dict[Node, Any] = {}
        self._writes: list[tuple[Node, Node | None]] = []
        entered: tuple[Node, ...] = ()
        # What holds around the graph holds at its start.
        grad_mode: Any = torch.is_grad_enabled()
        for node in graph.nodes:
            name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
            if name == "_enter_autocast":
                entered = (*entered, node)
            elif name == "_exit_autocast":
                entered = tuple(each for each in entered if each is not node.args[0])
            elif name == "_set_grad_enabled":
                grad_mode = node.args[0]
            elif "inference_mode" in name:
                grad_mode = node
            self._autocasts[node], self._grad_modes[node] = entered, grad_mode
            self._roots[node] = self._root(node, name)
            target = written(node)
            if target is not None:
                is_node = isinstance(target, Node)
                self._writes.append((node, self._roots[target] if is_node else None))

    def _root(self, node: Node, name: str) -> Node:
        target = written(node)
        if isinstance(target, Node):
            return self._roots[target]
        f = form(node)
        base = f["input"] if f.kind in _ALIASES else None
        if not f.kind and (name or str(node.target)).split(".")[0] in _OTHER_ALIASES:
            base = next(iter(node.all_input_nodes), None)
        return self._roots[base] if isinstance(base, Node) else node

    def add(self, node: Node, like: Node) -> None:
        """Take up a node that was put into the graph.

        Args:
            node: The new node, whose result is memory of its own.
            like: A node under the same modes.
        """
        self._roots[node] = node
        self._autocasts[node] = self._autocasts[like]
        self._grad_modes[node] = self._grad_modes[like]

    def are_under_same_modes(self, nodes: Iterable[Node]) -> bool:
        """Return whether autocast and the recording of gradients are the same at all nodes."""
        return len({(self._autocasts[n], self._grad_modes[n]) for n in nodes}) == 1

    @contextmanager
    def autocast(self, node: Node) -> Iterator[None]:
        """Run under the autocast that the graph enters before a node."""
        with ExitStack() as stack:
            for entered in self._autocasts[node]:
                arguments: tuple[Any, ...] = entered.args
                stack.enter_context(torch.amp.autocast_mode.autocast(*arguments))
            yield

    def is_written(
        self, operands: Iterable[Node], first: Node, last: Node, but: Iterable[Node] = ()
    ) -> bool:
        """Return whether memory of an operand is written between two nodes.

        Args:
            operands: Nodes whose results are read.
            first: The earliest node.
            last: The latest node.
            but: Nodes whose writes are part of what is fused.
        """
        roots = {self._roots[operand] for operand in operands}
        but = set(but)
        return any(
            first < node < last and node not in but and (root is None or root in roots)
            for node, root in self._writes
        )

    def is_seen_after(self, target: Any, write: Node) -> bool:
        """Return whether a tensor that a node writes in place is read later, but for its result.

        Args:
            target: What is written.
            write: The node that writes it.
        """
        root = self._roots[target]
        if root.op in ("placeholder", "get_attr"):
            return True
        return any(
            user > write
            for node, own in self._roots.items()
            if own is root and node < write and not node._erased
            for user in node.users
        )
