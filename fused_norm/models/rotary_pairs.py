"""Rotations of queries and of keys by the same angles, which one call computes."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fused_norm.models.flow import Flow, reads
from fused_norm.models.forms import name
from fused_norm.models.rotary_forms import Rotary
from fused_norm.models.values import are_same, dtype, is_tensor, shape, value
from fused_norm.models.writes import written

# Nodes that hold the same numbers if their inputs do.
_SAME = {
    *("view", "getitem", "slice", "select", "expand", "transpose", "permute", "cast"),
    *("contiguous", "clone", "repeat_interleave"),
}


def place_of_both(one: Rotary, other: Rotary, flow: Flow) -> Node | None:
    """Return the node where one call can compute two rotations, None if none can.

    Args:
        one: A rotation.
        other: Another one, later in the graph.
        flow: The order of the graph.
    """
    if not _are_of_one_kind(one, other):
        return None
    views: set[Node] = set()
    sources = [
        _common_source(*angles, views) for angles in ((one.cos, other.cos), (one.sin, other.sin))
    ]
    if None in sources:
        return None
    # At the first, if all that the second reads is there; else at the second, if none of the
    # first's readers comes earlier. Then neither depends on the other.
    heads = (other.base, None if other.norm is None else other.norm.gamma)
    if all(node is None or node < one.root for node in heads):
        place = one.root
    elif all(other.root < user for user in one.root.users):
        place = other.root
    else:
        return None
    inner = one.inner | other.inner
    read = [*one.operands(), *other.operands(), *(node for node in sources if node is not None)]
    if not flow.are_under_same_modes(inner) or not flow.are_recorded_alike(reads(inner, read)):
        return None
    last = None if value(one.root).requires_grad else max(one.root, other.root)
    return None if flow.is_written(read, min(inner | views), last) else place


def _are_of_one_kind(one: Rotary, other: Rotary) -> bool:
    """Return whether two rotations differ in their tensors and numbers of heads alone."""
    if one.is_interleaved != other.is_interleaved or dtype(one.base) is not dtype(other.base):
        return False
    if value(one.root).requires_grad != value(other.root).requires_grad:
        return False
    if value(one.base).device != value(other.base).device:
        return False
    a, b = one.norm, other.norm
    if (a is None) != (b is None):
        return False
    if a is not None and b is not None:
        if (a.eps, a.offset) != (b.eps, b.offset):
            return False
        gammas = [value(each.gamma).dtype for each in (a, b) if each.gamma is not None]
        if len(set(gammas)) > 1:
            return False
    return are_same(_rows_and_elements(one), _rows_and_elements(other))


def _rows_and_elements(r: Rotary) -> tuple[Any, ...]:
    sizes = shape(r.root)
    return sizes[0], sizes[2 if r.has_heads_first else 1], sizes[3]


def _common_source(a: Any, b: Any, views: set[Node]) -> Node | None:
    """Return the node that two are the same views and casts of; None if they may differ.

    Models make angles broadcast once for queries and again for keys.

    Args:
        a: A node.
        b: Another one, or the same.
        views: Receives the nodes between both and their source.
    """
    if not is_tensor(a) or not is_tensor(b):
        return None
    if a is b:
        source: Node = a
        return source
    is_one_op = a.op == b.op and a.target == b.target and name(a) in _SAME
    if not is_one_op or not a.args or not b.args or written(a) or written(b):
        return None
    if a.args[1:] != b.args[1:] or a.kwargs != b.kwargs:
        return None
    # Equal indices may be True and 1.
    if not are_same(shape(a), shape(b)):
        return None
    views |= {a, b}
    return _common_source(a.args[0], b.args[0], views)
