"""Removes attention masks that mask nothing or all that is later, which models create when traced.

transformers omits a mask that masks nothing, and says `is_causal` for one that masks all
that is later. While traced it cannot check that, and creates a mask of constants. Because of the
strides of one that masks nothing, PyTorch decomposes attention in float32, which took twice the
time of all of BERT; and with a mask, attention computes what is later, too: half of its time. What
a graph computes from constants alone is known, so it is checked here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from fused_norm.models.flow import Flow
from fused_norm.models.sdpa import arguments, give
from fused_norm.models.values import computed, is_tensor, value

# Functions that masks are made with: their results depend on their arguments alone.
_FUNCTIONS = {
    *(torch.arange, torch.ones, torch.zeros, torch.full, torch.where, torch.unsqueeze),
    *(operator.add, operator.sub, operator.mul, operator.getitem, operator.and_, operator.or_),
    *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne),
    *(operator.invert, torch.ge, torch.gt, torch.le, torch.lt, torch.eq, torch.ne),
    *(torch.add, torch.sub, torch.mul, torch.diff, torch.cumsum),
    *(torch.logical_and, torch.logical_or, torch.logical_not, torch.bitwise_and),
}
_METHODS = {
    *("expand", "view", "unsqueeze", "to", "bool", "logical_and", "logical_not", "new_ones"),
    *("cumsum", "diff", "repeat", "__and__", "__or__", "__invert__", "__add__", "__sub__"),
    *(f"__{each}__" for each in ("eq", "ne", "ge", "gt", "le", "lt")),
}
# Most elements of a tensor that is computed for the check; larger masks stay.
_MOST_ELEMENTS = 1 << 26


def drop_known_masks(flow: Flow, handed: Mapping[Node, Tensor]) -> dict[Node, str]:
    """Remove masks from a graph's attention that mask nothing, or what `is_causal` does.

    Args:
        flow: What is known of the graph.
        handed: Values of inputs of the graph that are known.

    Returns:
        What each call of attention that is changed has now.
    """
    changed = {}
    found: dict[Node, Any] = dict(handed)
    for node in flow.graph.nodes:
        if node.target is not F.scaled_dot_product_attention:
            continue
        given = arguments(node)
        mask = given.get("attn_mask")
        if not (isinstance(mask, Node) and _fits(mask, given["query"], given["key"])):
            continue
        if not _constants(mask, flow, handed):
            continue
        with torch.no_grad(), unset_fake_temporarily():
            known = _narrowed(_computed(mask, found))
            is_causal = _is_causal(known, *value(mask).shape[-2:])
            if not (is_causal or _masks_nothing(known)):
                continue
        if is_causal and given.get("is_causal", False) is not False:
            continue
        give(node, "attn_mask", None)
        if is_causal:
            give(node, "is_causal", True)
        changed[node] = "is_causal" if is_causal else "no mask"
    for node in sorted(found.keys() - handed.keys(), reverse=True):
        if not node.users:
            flow.graph.erase_node(node)
    return changed


def masks_handed_over(
    call: Node, body: Graph, flow: Flow, found: dict[Node, Any]
) -> dict[Node, Tensor]:
    """Return the values of masks of constants that a checkpoint is called with, by its inputs.

    Args:
        call: The call of the checkpoint.
        body: The checkpoint's graph.
        flow: What is known of the graph that calls it.
        found: Values of nodes of that graph; receives those that are computed here.
    """
    inputs = [node for node in body.nodes if node.op == "placeholder"]
    if len(inputs) != len(call.args) - 1:
        return {}
    handed = {}
    for own, outer in zip(inputs, call.args[1:], strict=True):
        is_read = any(user.target is F.scaled_dot_product_attention for user in own.users)
        if is_read and isinstance(outer, Node) and _constants(outer, flow, {}):
            with torch.no_grad(), unset_fake_temporarily():
                handed[own] = _computed(outer, found)
    return handed


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


def _constants(mask: Node, flow: Flow, handed: Mapping[Node, Tensor]) -> set[Node]:
    """Return the nodes that compute a mask, if only from numbers and with functions known here.

    Values that are handed over are as good as numbers.
    """
    ahead, seen = [mask], set[Node]()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in handed:
            continue
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


def _narrowed(mask: Tensor) -> Tensor:
    """Return one of each of a mask's equal rows."""
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, min(mask.shape[dim], 1))
    return mask


def _masks_nothing(mask: Tensor) -> bool:
    return bool(mask.all() if mask.dtype is torch.bool else (mask == 0).all())


def _is_causal(mask: Tensor, rows: int, columns: int) -> bool:
    """Return whether a mask leaves each row itself and what is before it.

    Which rows of another length are before it differs between implementations of attention.
    """
    if rows != columns or rows == 1 or tuple(mask.shape[-2:]) != (rows, columns):
        return False
    left = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is torch.bool:
        return bool((mask == left).all())
    return bool(
        (mask == torch.zeros_like(left, dtype=mask.dtype).masked_fill(~left, -torch.inf)).all()
    )
