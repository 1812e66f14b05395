"""The order of a graph: who writes where, which modes are active, what shares memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch.fx import Graph, Node

from fused_norm.models.values import value
from fused_norm.models.writes import is_given, storages, written


class Flow:
    """Facts about a graph that its nodes do not show.

    Nodes that are added later write nothing, and run under the modes of the place where they are
    added.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._storages: dict[Node, frozenset[int]] = {}
        self._nodes_in: defaultdict[int, list[Node]] = defaultdict(list)
        self._autocasts: dict[Node, tuple[Node, ...]] = {}
        self._grad_modes: dict[Node, Any] = {}
        # Writes in the order of the graph, by the memory that they write; None if that is unknown.
        self._writes: defaultdict[Any, list[Node]] = defaultdict(list)
        # Inputs that had their own memory while the graph was traced, and may share it in a later
        # call, which no guard checks. A write to one is also filed under its dtype, and counts as
        # a write to all inputs of that dtype.
        self._given: dict[int, torch.dtype] = {
            memory: value(node).dtype
            for node in graph.nodes
            if is_given(node)
            for memory in self._remember(node)
        }
        entered: tuple[Node, ...] = ()
        # The modes around the graph are active at its start.
        grad_mode: Any = torch.is_grad_enabled()
        outer: dict[Any, Any] = {}
        for node in graph.nodes:
            name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
            if name == "_enter_autocast":
                entered = (*entered, node)
            elif name == "_exit_autocast":
                entered = tuple(each for each in entered if each is not node.args[0])
            elif name == "_set_grad_enabled":
                grad_mode = node.args[0]
            elif name == "_enter_inference_mode":
                outer[node], grad_mode = grad_mode, node
            elif name == "_exit_inference_mode":
                grad_mode = outer[node.args[0]]
            self._autocasts[node], self._grad_modes[node] = entered, grad_mode
            self._remember(node)
            if targets := written(node):
                is_known = all(value(target) is not None for target in targets)
                for memory in self._shared(targets) if is_known else (None,):
                    self._writes[memory].append(node)

    def _remember(self, node: Node) -> frozenset[int]:
        if node not in self._storages:
            self._storages[node] = storages(node)
            for memory in self._storages[node]:
                self._nodes_in[memory].append(node)
        return self._storages[node]

    def reach(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Return the memory of the results of nodes."""
        return frozenset[int]().union(*map(self._remember, nodes))

    def _shared(self, nodes: Iterable[Node]) -> set[Any]:
        """Return the memory of nodes, and the dtypes of inputs among it, which may be shared."""
        own = self.reach(nodes)
        return {*own, *(self._given[memory] for memory in own if memory in self._given)}

    def add(self, node: Node, like: Node) -> None:
        """Register a node that was added to the graph.

        Args:
            node: The new node.
            like: A node under the same modes.
        """
        self._autocasts[node] = self._autocasts[like]
        self._grad_modes[node] = self._grad_modes[like]

    def are_under_same_modes(self, nodes: Iterable[Node]) -> bool:
        """Return whether autocast and the recording of gradients are the same at all nodes."""
        return len({(self._autocasts[n], self._grad_modes[n]) for n in nodes}) == 1

    def are_recorded_alike(self, nodes: Iterable[Node]) -> bool:
        """Return whether gradients are recorded at all nodes that compute something, or at none.

        A call that replaces nodes hands gradients to all of its operands, also through
        copies, casts and views that a model made without recording them.
        """
        return len({self._grad_modes[n] for n in nodes if n.op.startswith("call_")}) < 2

    def records_gradients(self, node: Node) -> bool:
        """Return whether gradients are recorded at a node."""
        return self._grad_modes[node] is True

    @contextmanager
    def autocast(self, node: Node) -> Iterator[None]:
        """Run under the autocast that is active at a node."""
        with ExitStack() as stack:
            for entered in self._autocasts[node]:
                arguments: tuple[Any, ...] = entered.args
                stack.enter_context(torch.amp.autocast_mode.autocast(*arguments))
            yield

    def is_written(
        self,
        operands: Iterable[Node],
        first: Node,
        last: Node | None = None,
        but: Iterable[Node] = (),
    ) -> bool:
        """Return whether the memory of an operand is written between two nodes, or may be.

        Args:
            operands: Nodes whose results are read.
            first: The earliest node.
            last: The latest node, or None for the end of the graph.
            but: Nodes whose writes are part of what is fused.
        """
        but = set(but)
        for memory in (None, *self._shared(operands)):
            writes = self._writes.get(memory, ())
            for write in islice(writes, bisect_right(writes, first), None):
                if last is not None and not write < last:
                    break
                if write not in but:
                    return True
        return False

    def is_write_seen(self, write: Node) -> bool:
        """Return whether a tensor that a node writes in place is read later, except as its result.

        Args:
            write: The node; if it writes nothing, the answer is no.
        """
        targets = written(write)
        if any(value(target) is None for target in targets):
            return True
        return any(
            node.op in ("placeholder", "get_attr") or any(user > write for user in node.users)
            for memory in self.reach(targets)
            for node in self._nodes_in[memory]
            if not node._erased and node < write
        )


def reads(inner: Iterable[Node], operands: Iterable[Node]) -> set[Node]:
    """Return all nodes of a call, and those between it and its operands, which may be copies."""
    found, ahead, ends = set(inner), list(inner), set(operands)
    while ahead:
        for node in _read_by(ahead.pop()):
            if node not in found and node not in ends and node.op != "placeholder":
                found.add(node)
                ahead.append(node)
    return found


def _read_by(node: Node) -> list[Node]:
    """Return the inputs that a node reads: of a cast, not the tensor that only gives its type."""
    is_cast = node.op == "call_method" and node.target in ("to", "type_as")
    return node.all_input_nodes[:1] if is_cast else node.all_input_nodes
