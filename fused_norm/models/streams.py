"""Splits an MLP on concatenated rows if its result is split again.

Models that mix two streams of tokens normalize each, and concatenate them for a shared MLP
(CogVideoX). Each row goes through it separately, so each stream can, too: nothing is concatenated,
and each norm is followed by its Linear layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from fused_norm.models.emit import Emitter
from fused_norm.models.forms import form, is_noop, only_user
from fused_norm.models.norms import candidates, find_norm
from fused_norm.models.readers import find_product, find_readers
from fused_norm.models.values import is_tensor, shape, value
from fused_norm.models.writes import written

_BY_ELEMENT = {"gelu", "silu", "relu", "tanh", "sigmoid"}


def split_streams(emitter: Emitter) -> None:
    """Split readers of several norms' concatenated rows, as long as nothing else reads these.

    Args:
        emitter: Adds nodes to the graph.
    """
    found: Counter[Node] = Counter()
    for node in candidates(emitter.graph):
        norm = find_norm(node)
        if norm is not None:
            beyond = find_readers(norm).beyond
            found.update({form(p.node)["input"] for p, is_rows in beyond if is_rows})
    for whole, norms in found.items():
        parts = form(whole)["tensors"]
        if isinstance(parts, (list, tuple)) and norms == len(parts):
            _split(whole, parts, emitter)


def _split(whole: Node, parts: Sequence[Any], emitter: Emitter) -> None:
    graph, flow = emitter.graph, emitter.flow
    dim = form(whole).args.get("dim", 0) % value(whole).dim()
    sizes = [shape(part)[dim] for part in parts]
    chain = _chain(whole)
    pieces = _pieces(chain[-1], dim, sizes) if chain else None
    layers = sum(form(node).kind == "linear" for node in chain)
    if not pieces or layers < 2 or not flow.are_under_same_modes([*parts, whole, *chain]):
        return
    first = min(pieces)
    operands = {v for node in chain for v in node.all_input_nodes} - {whole, *chain}
    if any(v > first for v in operands) or flow.is_written([*parts, *operands], whole, first):
        return
    results = []
    with graph.inserting_before(first):
        for part in parts:
            now = {whole: part}
            for node in chain:
                args, kwargs = map_arg((node.args, node.kwargs), partial(_now, now))
                target: Any = node.target
                now[node] = emitter.emit(node, target, *args, **kwargs)
            results.append(now[chain[-1]])
    for piece, index in pieces.items():
        piece.replace_all_uses_with(results[index])
        graph.erase_node(piece)
    for node in (*reversed(chain), whole):
        graph.erase_node(node)


def _now(now: dict[Node, Node], node: Node) -> Node:
    return now.get(node, node)


def _chain(node: Node) -> list[Node]:
    """Return the nodes after one, each its only reader, that process each row separately."""
    chain: list[Node] = []
    while (user := only_user(node)) is not None and not written(user) and is_tensor(user):
        product = find_product(user, node)
        is_layer = product is not None and product.node is user and form(user).kind == "linear"
        is_dropout = form(user).kind == "dropout" and is_noop(user)
        if not (is_layer or is_dropout or form(user).kind in _BY_ELEMENT):
            break
        chain.append(user)
        node = user
    return chain


def _pieces(node: Node, dim: int, sizes: Sequence[Any]) -> dict[Node, int] | None:
    """Return the readers of concatenated rows that each read one part, and which; or None."""
    if not all(isinstance(size, int) for size in sizes):
        return None
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    found = {}
    for user in node.users:
        index = form(user)["index"] if form(user).kind == "getitem" else None
        index = index if isinstance(index, tuple) else (index,)
        if len(index) <= dim or any(not isinstance(i, slice) for i in index):
            return None
        others = (*index[:dim], *index[dim + 1 :])
        bounds = (index[dim].start, index[dim].stop)
        if any(i != slice(None) for i in others) or index[dim].step not in (None, 1):
            return None
        if not all(bound is None or isinstance(bound, int) for bound in bounds):
            return None
        start, stop, _ = index[dim].indices(ends[-1])
        if stop not in ends or start != stop - sizes[ends.index(stop)]:
            return None
        found[user] = ends.index(stop)
    return found
