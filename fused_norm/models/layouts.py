"""Layouts of results: the model's own wherever something other than our calls reads them.

A model whose rows are transposed at first, as after a convolution, keeps its residual sums so
throughout. Kernels read and write dense rows, so each call would copy its sum in and out. Instead,
rows stay dense between calls, and are copied to the model's layout for other readers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fused_norm.functional import linear_add
from fused_norm.models.calls import CALLS, Left
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow
from fused_norm.models.forms import above
from fused_norm.models.laid_out import lay_out, memory_order
from fused_norm.models.values import (
    are_same,
    dtype,
    have_same_strides,
    is_plain,
    is_sharded,
    is_tensor,
    shape,
    value,
)
from fused_norm.ops.operands import hint

Emit = Callable[..., Node]


def fitted(old: Node, new: Node, emit: Emit) -> Node:
    """Return the replacement of a node: of the same shape, dtype and layout in memory.

    Args:
        old: The node.
        new: The result that is to replace it.
        emit: Adds a node to the graph.

    Raises:
        Left: If the result differs from the model's.
    """
    if not is_tensor(new) or dtype(new) is not dtype(old):
        raise Left(f"would return {dtype(new)} where the model has {dtype(old)}")
    places = [getattr(value(node), "placements", None) for node in (old, new)]
    if places[0] != places[1]:
        raise Left(f"would be placed {places[1]} where the model has {places[0]}")
    if not are_same(tuple(shape(old)), tuple(shape(new))):
        raise Left(f"would return {tuple(shape(new))} where the model has {tuple(shape(old))}")
    if not (is_sharded(value(old)) or have_same_strides(value(old), value(new))):
        new = _laid_out(new, value(old), emit)
    # Views of the old node's memory are views of the new one's from now on.
    _take_value(new, old)
    return new


def _laid_out(rows: Node, like: Tensor, emit: Emit) -> Node:
    """Return a copy of rows whose dimensions have the memory order of another tensor's."""
    order = memory_order(like)
    if like.requires_grad:
        laid = emit(lay_out, rows, order)
    else:
        # An exported graph calls PyTorch's functions alone.
        laid = emit(torch.permute, rows, order)
        laid = emit(torch.clone, laid, memory_format=torch.contiguous_format)
        laid = emit(torch.permute, laid, [order.index(dim) for dim in range(len(order))])
    if not have_same_strides(like, value(laid)):
        raise Left(f"would lie in memory as {value(laid).stride()}, not {like.stride()}")
    return laid


def _rows_of_laid(node: Node) -> Node | None:
    """Return the rows that `_laid_out` copied to a node, None for other nodes."""
    targets = (lay_out,) if node.target is lay_out else (torch.permute, torch.clone, torch.permute)
    rows = node
    for target in targets:
        if rows.target is not target or not isinstance(rows.args[0], Node):
            return None
        rows = rows.args[0]
    is_call = rows.target is operator.getitem and rows.all_input_nodes[0].target in CALLS
    return rows if is_call and are_same(tuple(shape(node)), tuple(shape(rows))) else None


def _erase_unread(node: Node, until: Node) -> None:
    while node is not until and not node.users:
        above_it = node.all_input_nodes[0]
        node.graph.erase_node(node)
        node = above_it


def _take_value(new: Node, old: Node) -> None:
    new.meta.update({key: old.meta[key] for key in ("example_value", "val") if key in old.meta})


def keep_dense(emitter: Emitter) -> None:
    """Let the calls of a graph pass rows to each other in dense memory, and their gradients.

    Args:
        emitter: Adds nodes to the graph, with calls of the op family in it.
    """
    graph = emitter.graph
    calls = [node for node in graph.nodes if node.target in CALLS]
    readers = Counter(above(t, casts=False) for call in calls for t in _rows(call) if is_turned(t))
    # Dense rows, by the copies of them that are not dense.
    laid = {node: rows for node in graph.nodes if (rows := _rows_of_laid(node)) is not None}
    copies = dict(laid)
    # Results whose layout differs from the traced one.
    moved: set[Node] = set()
    for call in calls:
        results = [node for node in _results(call) if is_turned(node)]
        turned = _turned(call, emitter.flow)
        # A call copies its operand anyway: a separate copy pays if another reader shares it, or if
        # a gradient comes back, whose layout is the operand's then.
        if not results:
            turned = [
                t
                for t in turned
                if (r := above(t, casts=False)) in copies
                or readers[r] > 1
                or value(r).requires_grad
            ]
        for node in turned:
            rows = above(node, casts=False)
            if rows not in copies:
                copies[rows] = _dense(rows, call, emitter)
            call.replace_input_with(node, copies[rows])
        if turned or not moved.isdisjoint(_rows(call)):
            before = [(node, dict(node.meta)) for node in results]
            for node in (call, *_items(call)):
                emitter.trace(node, call)
            moved.update(results)
            for node, meta in before:
                _lay_out_for_others(node, meta, emitter)
    for node in laid:
        _erase_unread(node, laid[node])


def _dense(rows: Node, call: Node, emitter: Emitter) -> Node:
    with emitter.graph.inserting_before(call):
        # What reads the gradient of a graph's input wants it dense, except for one sample:
        # PyTorch's BatchNorm goes wrong where its layout is not that of the result.
        is_laid = rows.op != "placeholder" or hint(shape(rows)[0]) == 1
        if value(rows).requires_grad and is_laid:
            return emitter.emit(call, lay_out, rows, list(range(value(rows).dim())))
        return emitter.emit(call, "contiguous", rows)


def _turned(call: Node, flow: Flow) -> list[Node]:
    """Return the operands of a call that are not dense and that nothing writes."""
    found = [(node, above(node, casts=False)) for node in _rows(call) if is_turned(node)]
    return [node for node, rows in found if not flow.is_written([node, rows], rows)]


def _lay_out_for_others(rows: Node, meta: dict[str, Any], emitter: Emitter) -> None:
    """Let all readers of a result except our calls read a copy in its original layout."""
    like = meta.get("val", meta.get("example_value"))
    assert isinstance(like, Tensor)
    if have_same_strides(value(rows), like):
        return
    # A write to the copy has to reach our calls as well.
    is_written = emitter.flow.is_written([rows], rows)
    others = [user for user in rows.users if is_written or user.target not in CALLS]
    if not others:
        return
    with emitter.graph.inserting_before(min(others)):
        laid = _laid_out(rows, like, partial(emitter.emit, rows))
    laid.meta.update({key: meta[key] for key in ("example_value", "val") if key in meta})
    for user in others:
        user.replace_input_with(rows, laid)


def _rows(call: Node) -> list[Node]:
    """Return the operands of a call that have a row for each row of its result."""
    found = [call.args[0], call.kwargs.get("residual"), call.kwargs.get("residual_out")]
    found += call.args[3:4] if call.target is linear_add else []
    return list(dict.fromkeys(node for node in found if isinstance(node, Node)))


def is_turned(node: Node) -> bool:
    """Return whether a node's rows are not dense in memory.

    Args:
        node: A node.
    """
    rows = value(node)
    if not (isinstance(rows, Tensor) and is_plain(rows) and rows.dim() > 1):
        return False
    return not (are_same(rows.shape[-1], 1) or are_same(rows.stride(-1), 1))


def _items(call: Node) -> Iterator[Node]:
    for user in call.users:
        if user.target is operator.getitem and user.args[0] is call:
            yield user
            yield from _items(user)


def _results(call: Node) -> list[Node]:
    return [node for node in (call, *_items(call)) if is_tensor(node)]
