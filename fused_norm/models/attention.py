"""Decomposes PyTorch's multi-head attention, so that its packed projection is a Linear layer."""

from __future__ import annotations

import inspect
import operator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fused_norm.models.emit import Emitter
from fused_norm.models.forms import form
from fused_norm.models.values import dtype, shape, value


def write_out_attention(emitter: Emitter) -> None:
    """Decompose self-attention that returns no weights, like `F.multi_head_attention_forward`.

    Args:
        emitter: Adds nodes to the graph.
    """
    graph = emitter.graph
    for node in list(graph.nodes):
        if form(node).kind != "attention" or node.op != "call_function":
            continue
        bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        if _is_plain(bound.arguments) and _reads_output_alone(node):
            with graph.inserting_before(node):
                y = _written_out(bound.arguments, emitter, node)
            for user in list(node.users):
                user.replace_all_uses_with(y)
                graph.erase_node(user)
            graph.erase_node(node)


def _is_plain(p: dict[str, Any]) -> bool:
    absent = ("bias_k", "bias_v", "static_k", "static_v", "key_padding_mask")
    return (
        p["query"] is p["key"]
        and p["key"] is p["value"]
        and all(p[name] is None for name in absent)
        and not (p["add_zero_attn"] or p["need_weights"] or p["use_separate_proj_weight"])
        and value(p["query"]).dim() == 3
    )


def _reads_output_alone(node: Node) -> bool:
    return all(
        form(user).kind == "getitem" and (form(user)["index"] == 0 or not user.users)
        for user in node.users
    )


def _written_out(p: dict[str, Any], emitter: Emitter, like: Node) -> Node:
    """Return the result of attention, whose nodes are added at the graph's insertion point."""
    emit = partial(emitter.emit, like)
    x, heads = p["query"], p["num_heads"]
    features = shape(x)[-1]
    parts = emit("chunk", emit(F.linear, x, p["in_proj_weight"], p["in_proj_bias"]), 3, -1)
    split = []
    for index in range(3):
        rows = emit(operator.getitem, parts, index)
        rows = emit("unflatten", rows, -1, (heads, features // heads))
        # [length, batch, heads, size] -> [batch, heads, length, size]
        split.append(emit("permute", rows, 1, 2, 0, 3))
    is_causal = bool(p["is_causal"])
    # If attention is said to be causal, PyTorch ignores the mask.
    mask = None if is_causal else p["attn_mask"]
    if isinstance(mask, Node) and not value(mask).is_floating_point():
        # True masks an element out.
        zeros = emit(torch.zeros_like, mask, dtype=dtype(split[0]))
        mask = emit("masked_fill", zeros, mask, float("-inf"))
    if isinstance(mask, Node) and value(mask).dim() == 3:
        mask = emit("unflatten", mask, 0, (-1, heads))
    chance = p["dropout_p"] if p["training"] else 0.0
    mixed = emit(F.scaled_dot_product_attention, *split, mask, chance, is_causal)
    mixed = emit("flatten", emit("contiguous", emit("permute", mixed, 2, 0, 1, 3)), 2)
    return emit(F.linear, mixed, p["out_proj_weight"], p["out_proj_bias"])
