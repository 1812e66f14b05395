"""Rotations of queries and keys whose keys, with the values, are written to caches by the call."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from fused_norm.models.costs import computes, count
from fused_norm.models.emit import Emitter
from fused_norm.models.values import are_same, dtype, is_plain, is_tensor, shape, value
from fused_norm.ops.rotary_cache import OP, TOKENS
from fused_norm.rotation import Rotation

_WRITE = "index_copy_"
# Nodes through which the queries may pass on their way from the call to attention.
_VIEWS = ("transpose", "contiguous", "getitem")


def write_caches(both: Node, emitter: Emitter) -> int:
    """Let the call that rotates queries and keys write its keys, and the values, to caches.

    `StaticCache` of transformers writes them after the rotation, each by an op of its own.

    Args:
        both: A call of `rotate_both`.
        emitter: Adds nodes to the graph, whose flow is known.

    Returns:
        The bytes of the keys, which are no longer written first; 0 if the call stays as it is.
    """
    queries, keys = (_item(both, i) for i in range(2))
    turned = _only_user(keys)
    write = None if turned is None else _only_user(turned)
    if turned is None or write is None or not _is_write(write, turned):
        return 0
    if not _changes_places(turned):
        return 0
    other, views = write.next, []
    while is_tensor(other) and not computes(other):
        views.append(other)
        other = other.next
    if not _is_write(other, None) or other.args[1:3] != write.args[1:3]:
        return 0
    x, gamma, second_x, second_gamma, cos, sin, *options = both.args
    slots = write.args[2]
    third = other.args[3]
    read = [x, gamma, second_x, second_gamma, cos, sin, slots, third]
    tensors: Any = [v for v in read if v is not None]
    caches: Any = [write.args[0], other.args[0]]
    # A view may copy, with what the first write wrote.
    if emitter.flow.reach(v for node in views for v in node.all_input_nodes) & emitter.flow.reach(
        caches
    ):
        return 0
    if not _can_write(caches, tensors, [both, write, other], emitter):
        return 0
    moved = _between(queries, other)
    if moved is None:
        return 0
    # The last option, of angles for each pair, is one that graphs do not have.
    options += [False] * (len(Rotation._fields) - len(options))
    emitter.made.clear()
    with emitter.graph.inserting_before(other):
        values = emitter.emit(other, "transpose", third, 1, 2)
        call = emitter.emit(other, OP, *read[:4], values, cos, sin, *caches, slots, *options)
    queries.replace_all_uses_with(call)
    for node in moved:
        other.prepend(node)
    for node, result in zip((write, other), caches, strict=True):
        node.replace_all_uses_with(result)
        emitter.graph.erase_node(node)
    saved = count(value(keys)) * dtype(keys).itemsize
    for node in (turned, keys, queries, both):
        emitter.graph.erase_node(node)
    return saved


def _item(both: Node, index: int) -> Node:
    return next(u for u in both.users if u.target is operator.getitem and u.args[1] == index)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _changes_places(node: Node) -> bool:
    """Return whether a node gives keys with heads before rows, and nothing else."""
    name = getattr(node.target, "__name__", node.target)
    dims = [dim % 4 for dim in node.args[1:] if isinstance(dim, int)]
    return name == "transpose" and not node.kwargs and sorted(dims) == [1, 2]


def _is_write(node: Node, source: Node | None) -> bool:
    """Return whether a node writes rows of heads, those of a source if given, to a cache."""
    if node.op != "call_method" or node.target != _WRITE or len(node.args) != 4 or node.kwargs:
        return False
    cache, dim, slots, written = node.args
    if not all(map(is_tensor, (cache, slots, written))) or source not in (None, written):
        return False
    return len(shape(cache)) == len(shape(written)) == 4 and dim in (TOKENS, TOKENS - 4)


def _can_write(
    caches: list[Node], tensors: list[Node], nodes: list[Node], emitter: Emitter
) -> bool:
    """Return whether one call can write both caches where the second was written.

    Args:
        caches: The caches.
        tensors: All that the call reads.
        nodes: The call that rotates, and the two writes, with views alone between these.
        emitter: Knows the flow.
    """
    flow, (both, write, other) = emitter.flow, nodes
    if not all(is_plain(value(v)) for v in (*caches, *tensors)):
        return False
    wants_gradients = any(value(v).requires_grad for v in (*caches, *tensors))
    if wants_gradients and flow.records_gradients(both):
        return False
    if not flow.are_under_same_modes(nodes):
        return False
    # Each cache is written, and nothing else of what the call knows, whatever comes first.
    one, two = (flow.reach([v]) for v in caches)
    if one & two or flow.reach(tensors) & (one | two):
        return False
    keys, third = write.args[3], tensors[-1]
    if any(dtype(v) is not dtype(third) for v in (keys, *caches)):
        return False
    # The first write's cache shares memory with no other input: a promise of all caches.
    is_written = flow.is_written(tensors, both, other, but=[write])
    return are_same(shape(keys), shape(third)) and not is_written


def _between(queries: Node, write: Node) -> list[Node] | None:
    """Return the views of the queries before a write, in order; None if something computes."""
    found, ahead = [], [queries]
    while ahead:
        for user in ahead.pop().users:
            if write < user:
                continue
            name = getattr(user.target, "__name__", user.target)
            if name not in _VIEWS or len(user.all_input_nodes) != 1:
                return None
            found.append(user)
            ahead.append(user)
    return sorted(found)
