"""Calls attention without masks and with fewer heads, where its result is the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.fx import Node

from fused_norm.models.flow import Flow
from fused_norm.models.grouped_heads import share_heads
from fused_norm.models.masks import drop_known_masks
from fused_norm.models.norms import module_path
from fused_norm.models.sdpa import arguments
from fused_norm.models.sites import ATTENTION, Site
from fused_norm.models.values import value


def simplify_attention(flow: Flow, masks: Mapping[Node, Tensor]) -> list[Site]:
    """Change the calls of attention of a graph; return those that are changed.

    Args:
        flow: What is known of the graph.
        masks: Inputs of the graph that are masks whose values are known.
    """
    changed = {node: [words] for node, words in drop_known_masks(flow, masks).items()}
    for node in share_heads(flow):
        changed.setdefault(node, []).append("keys and values of fewer heads")
    sites = []
    for node, words in changed.items():
        site = Site(module_path(node), ATTENTION).describe(value(arguments(node)["query"]))
        site.fused, site.calls, site.implementation = True, [", ".join(words)], "PyTorch"
        sites.append(site)
    return sites
