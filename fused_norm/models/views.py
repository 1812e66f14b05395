"""Views of rows: nodes that keep each row whole, wherever they move it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fused_norm.models.forms import form
from fused_norm.models.values import are_same, is_tensor, shape, value

VIEWS = (
    *("view", "permute", "transpose", "getitem", "select", "slice", "roll", "expand"),
    *("from_local", "redistribute"),
)
"""Kinds of nodes that may be views."""


def column_after(node: Node, source: Node, column: int) -> int | None:
    """Return the dimension of the features after a view; None if rows do not stay whole.

    Args:
        node: A reader of rows.
        source: The rows.
        column: The dimension of the features in these rows.
    """
    f = form(node)
    if f.kind not in VIEWS or f["input"] is not source or not is_tensor(node):
        return None
    if value(node).dtype is not value(source).dtype:
        return None
    before, after = shape(source), shape(node)
    last = len(after) - 1
    if is_permutation(node):
        return order_of(node, len(before)).index(column)
    if f.kind == "roll":
        dims = f["dims"] if isinstance(f["dims"], (tuple, list)) else (f["dims"],)
        keeps = all(d is not None and d % len(before) != column for d in dims)
        return column if keeps else None
    if column != len(before) - 1 or last < 0 or not are_same(after[-1], before[-1]):
        return None
    if f.kind == "getitem" and not _keeps_features(f["index"], column):
        return None
    if f.kind in ("select", "slice") and f.args.get("dim", 0) % len(before) == column:
        return None
    return last


def is_permutation(node: Node) -> bool:
    """Return whether a node only changes the order of dimensions."""
    return form(node).kind in ("permute", "transpose")


def inverse(node: Node) -> list[int]:
    """Return the order of dimensions that reverts a permutation."""
    order = order_of(node, value(node).dim())
    return [order.index(dim) for dim in range(len(order))]


def order_of(node: Node, rank: int) -> list[int]:
    """Return which dimension of its input each dimension of a permutation is.

    Args:
        node: The permutation.
        rank: Its number of dimensions.
    """
    f = form(node)
    order = list(range(rank))
    if f.kind == "transpose":
        a, b = f["dim0"] % rank, f["dim1"] % rank
        order[a], order[b] = b, a
        return order
    dims: Any = f["dims"] if isinstance(f["dims"], (tuple, list)) else node.args[1:]
    return [d % rank for d in dims]


def _keeps_features(index: Any, column: int) -> bool:
    """Return whether an index selects whole rows."""
    index = index if isinstance(index, tuple) else (index,)
    picked = [i for i in index if i is not None]
    if len(picked) == column + 1 and picked[-1] == slice(None):
        picked = picked[:-1]
    if len(picked) > column:
        return False
    tensors = [i for i in picked if isinstance(i, Node)]
    if tensors:
        return len(tensors) == len(picked) and all(
            is_tensor(i) and value(i).dtype is not torch.bool for i in tensors
        )
    return all(
        isinstance(i, int)
        or (isinstance(i, slice) and not any(isinstance(p, Node) for p in (i.start, i.stop)))
        for i in picked
    )
