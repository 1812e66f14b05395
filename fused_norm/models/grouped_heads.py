"""Lets attention read keys and values of fewer heads than queries as they are, not repeated.

transformers says `enable_gqa` where there is no mask. While traced, it creates a mask (masks.py),
and so repeats keys and values for each head of the queries, whose gradients are summed again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Node

from fused_norm.models.flow import Flow
from fused_norm.models.forms import form
from fused_norm.models.sdpa import arguments, give
from fused_norm.models.values import is_plain, is_tensor, shape, value

# Longer heads have no fused kernel that reads grouped ones.
_MOST_FEATURES = 256
_WHOLE = slice(None)


@dataclass
class _Repeated:
    """Heads that are repeated.

    Attributes:
        source: The heads, `[B, H, L, D]`.
        inner: The nodes that repeat them, in the order of the graph.
    """

    source: Node
    inner: list[Node]


def share_heads(flow: Flow) -> list[Node]:
    """Let a graph's attention without a mask read keys and values that are not repeated.

    Args:
        flow: What is known of the graph.

    Returns:
        The calls of attention that are changed.
    """
    changed = []
    for node in flow.graph.nodes:
        if node.target is not F.scaled_dot_product_attention:
            continue
        given = arguments(node)
        if given.get("attn_mask") is not None or given.get("enable_gqa"):
            continue
        names = ("key", "value")
        found = [_repeated(given.get(name)) for name in names]
        if _serves(given["query"], found) and _can_share(node, found, flow):
            for name, each in zip(names, found, strict=True):
                if each is not None:
                    give(node, name, each.source)
                    _erase(each.inner)
            give(node, "enable_gqa", True)
            changed.append(node)
    return changed


def _repeated(heads: object) -> _Repeated | None:
    """Return what heads repeat, each a number of times in a row; None for others."""
    if not isinstance(heads, Node) or not is_tensor(heads):
        return None
    expanded = form(heads)["input"]
    if form(heads).kind != "view" or form(expanded).kind != "expand":
        return None
    single = form(expanded)["input"]
    source = form(single)["input"]
    if not all(map(is_tensor, (expanded, single, source))) or len(shape(source)) != 4:
        return None
    if not _inserts_third(single, source):
        return None
    B, H, L, D = shape(source)
    if len(shape(expanded)) != 5:
        return None
    R = shape(expanded)[2]
    if shape(expanded) != (B, H, R, L, D) or shape(heads) != (B, H * R, L, D):
        return None
    return _Repeated(source, [single, expanded, heads])


def _inserts_third(single: Node, source: Node) -> bool:
    """Return whether a node only adds a dimension after the heads."""
    B, H, L, D = shape(source)
    if shape(single) != (B, H, 1, L, D):
        return False
    if form(single).kind == "view":
        return True
    index = form(single)["index"]
    return (
        form(single).kind == "getitem"
        and single.target is operator.getitem
        and isinstance(index, tuple)
        and index[:3] == (_WHOLE, _WHOLE, None)
        and all(each in (_WHOLE, Ellipsis) for each in index[3:])
    )


def _serves(query: Node, found: list[_Repeated | None]) -> bool:
    """Return whether fused attention reads grouped heads of these sizes and of this type."""
    keys, values = found
    if keys is None or values is None or not is_tensor(query) or len(shape(query)) != 4:
        return False
    q, k, v = (value(each) for each in (query, keys.source, values.source))
    if not (is_plain(q) and is_plain(k) and is_plain(v) and q.dtype == k.dtype == v.dtype):
        return False
    if q.is_cuda and not _has_kernel(q.device, q.dtype):
        return False
    if not all(isinstance(size, int) for each in (q, k, v) for size in each.shape):
        return False
    if k.shape != v.shape or q.shape[1] != shape(keys.inner[-1])[1]:
        return False
    return bool(q.shape[-1] == k.shape[-1] and q.shape[-1] <= _MOST_FEATURES)


def _has_kernel(device: torch.device, of: torch.dtype) -> bool:
    """Return whether PyTorch has a fused kernel on a GPU that reads grouped heads.

    The one for float32 and for GPUs before Ampere does not, and the other way is to write all
    scores to memory.
    """
    is_allowed = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()
    return (
        is_allowed
        and of in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _can_share(node: Node, found: list[_Repeated | None], flow: Flow) -> bool:
    """Return whether the heads are the same when attention reads them, gradients included."""
    sources = [each.source for each in found if each is not None]
    inner = [each for repeated in found if repeated is not None for each in repeated.inner]
    # A backward reads what attention read, so nothing may write it later either.
    return flow.are_recorded_alike([*inner, node]) and not flow.is_written(
        sources + inner, min(inner)
    )


def _erase(inner: list[Node]) -> None:
    for each in reversed(inner):
        if not each._erased and not each.users:
            each.graph.erase_node(each)
