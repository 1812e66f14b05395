"""Removes attention masks that mask nothing, which models create while they are traced.

transformers omits a mask that masks nothing. While traced it cannot check that, and creates a mask
of constants. Because of its strides, PyTorch decomposes attention in float32, which took twice the
time of all of BERT. What a graph computes from constants alone is known, so it is checked here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from fused_norm.models.flow import Flow
from fused_norm.models.values import computed, is_tensor, value

# Functions that masks are made with: their results depend on their arguments alone.
_FUNCTIONS = {
    *(torch.arange, torch.ones, torch.zeros, torch.full, torch.where, torch.unsqueeze),
    *(operator.add, operator.sub, operator.mul, operator.getitem, operator.and_, operator.or_),
    *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.invert),
    *(torch.ge, torch.gt, torch.le, torch.lt, torch.eq, torch.add, torch.sub, torch.mul),
    *(torch.logical_and, torch.logical_or, torch.logical_not, torch.bitwise_and),
}
_METHODS = {"expand", "view", "unsqueeze", "to", "bool", "logical_and", "logical_not", "new_ones"}
# Attention's first arguments.
_NAMES = ("query", "key", "value", "attn_mask")
# Most elements of a tensor that is computed for the check; larger masks stay.
_MOST_ELEMENTS = 1 << 26


def drop_idle_masks(flow: Flow) -> None:
    """Remove masks that mask nothing from a graph's attention.

    Args:
        flow: What is known of the graph.
    """
    found: dict[Node, Any] = {}
    for node in flow.graph.nodes:
        if node.target is not F.scaled_dot_product_attention:
            continue
        given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        mask = given.get("attn_mask")
        if not (isinstance(mask, Node) and _fits(mask, given["query"], given["key"])):
            continue
        sources = _constants(mask, flow)
        with torch.no_grad(), unset_fake_temporarily():
            if not sources or not _masks_nothing(_computed(mask, found)):
                continue
        if "attn_mask" in node.kwargs:
            node.update_kwarg("attn_mask", None)
        else:
            node.update_arg(3, None)
    for node in sorted(found, reverse=True):
        if not node.users:
            flow.graph.erase_node(node)


def _fits(mask: Node, query: Any, key: Any) -> bool:
    """Return whether attention's result has the same shape without the mask."""
    q, k = value(query), value(key)
    if not (is_tensor(mask) and isinstance(q, Tensor) and isinstance(k, Tensor)):
        return False
    wanted = (*q.shape[:-1], k.shape[-2])
    own = (1,) * (len(wanted) - value(mask).dim()) + tuple(value(mask).shape)
    return len(own) == len(wanted) and all(
        isinstance(size, int) and size in (1, other)
        for size, other in zip(own, wanted, strict=True)
    )


def _constants(mask: Node, flow: Flow) -> set[Node]:
    """Return the nodes that compute a mask, if only from numbers and with functions known here."""
    ahead, seen = [mask], set[Node]()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        targets: Any = _METHODS if node.op == "call_method" else _FUNCTIONS
        if node.op not in ("call_function", "call_method") or node.target not in targets:
            return set()
        if not is_tensor(node) or not _is_short(value(node)):
            return set()
        ahead += node.all_input_nodes
    return set() if flow.is_written(seen, min(seen)) else seen


def _is_short(t: Tensor) -> bool:
    """Return whether a tensor's sizes are known, and it has few elements in its own memory."""
    if not all(isinstance(size, int) for size in (*t.shape, *t.stride())):
        return False
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride else 1
    return count <= _MOST_ELEMENTS


def _computed(node: Node, found: dict[Node, Any]) -> Any:
    """Return a node's value; known values are reused."""
    if node not in found:
        for source in node.all_input_nodes:
            _computed(source, found)
        found[node] = computed(node, found.__getitem__)
    return found[node]


def _masks_nothing(mask: Tensor) -> bool:
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, min(mask.shape[dim], 1))
    return bool(mask.all() if mask.dtype is torch.bool else (mask == 0).all())
