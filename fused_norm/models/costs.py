"""Costs of the ops of a graph, counted with the sizes that it was traced with."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor
from torch.fx import Node

from fused_norm.models.forms import form, is_noop
from fused_norm.models.values import value
from fused_norm.ops.operands import hint

_VIEWS = {
    *("view", "permute", "transpose", "t", "getitem", "select", "slice", "expand", "chunk"),
    *("split", "unbind", "narrow"),
}


def count(tensor: Tensor) -> int:
    """Return how many elements a fake tensor has."""
    return math.prod(map(hint, tensor.shape))


def computes(node: Node) -> bool:
    """Return whether a node computes something, rather than only changing the view of memory."""
    is_call = node.op in ("call_function", "call_method")
    return is_call and form(node).kind not in _VIEWS and not is_noop(node)


def count_ops(nodes: Iterable[Node]) -> int:
    """Return how many of some nodes compute something."""
    return sum(map(computes, nodes))


def bytes_written(nodes: Iterable[Node]) -> int:
    """Return the bytes of the tensors that some nodes write."""
    tensors = [value(node) for node in nodes if computes(node)]
    return sum(count(t) * t.dtype.itemsize for t in tensors if isinstance(t, Tensor))
