"""The pass: every norm of a graph, found, and fused with what reads it where that can be."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fused_norm.models.attention import write_out_attention
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow
from fused_norm.models.forms import above, form, is_noop, shape, value, written
from fused_norm.models.norms import Norm, candidates, find_norm
from fused_norm.models.readers import Readers, find_readers
from fused_norm.models.rewrite import Call, Left, Rewriter
from fused_norm.models.sites import Site
from fused_norm.ops.validation import serves

log = logging.getLogger("fused_norm.models")

_VIEW_KINDS = {"view", "permute", "transpose", "t", "getitem", "select", "slice", "expand", "chunk"}


@dataclass(frozen=True)
class Options:
    """What a pass may do.

    Attributes:
        rounding: `"once"`, or `"model"` to keep rounding that a model does in between.
    """

    rounding: str = "once"

    def __post_init__(self) -> None:
        if self.rounding not in ("once", "model"):
            raise ValueError(f"rounding must be 'once' or 'model', got {self.rounding!r}")


def fuse(module: GraphModule, options: Options) -> list[Site]:
    """Rewrite the graph of a module, and those that it holds for checkpoints; return its norms.

    Args:
        module: The module, recompiled where its graph changed.
        options: What may be done.
    """
    sites = []
    for node in module.graph.nodes:
        body = getattr(module, node.target, None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule) and _is_checkpoint(node):
            sites += fuse(body, options)
    sites += fuse_graph(module.graph, options)
    module.graph.lint()
    module.recompile()
    return sites


def _is_checkpoint(node: Node) -> bool:
    names = {getattr(user.target, "__name__", "") for user in node.users}
    return bool(names) and names <= {"tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint"}


def fuse_graph(graph: Graph, options: Options) -> list[Site]:
    """Rewrite one graph; return its norms.

    Args:
        graph: The graph.
        options: What may be done.
    """
    flow = Flow(graph)
    write_out_attention(graph, Emitter(graph, flow))
    flow = Flow(graph)
    inputs = _fused_inputs(graph)
    rewriter = Rewriter(
        graph,
        flow,
        options.rounding == "model",
        lambda total: any(_leads_to(user, total, inputs) for user in [total, *total.users]),
    )
    sites = []
    for node in candidates(graph):
        norm = None if node._erased else find_norm(node)
        if norm is not None:
            sites.append(_site(norm, rewriter))
    return sites


def _fused_inputs(graph: Graph) -> set[Node]:
    """Return what the norms read that Linear layers read."""
    found = set()
    for node in candidates(graph):
        norm = find_norm(node)
        if norm is not None and find_readers(norm).readings:
            found.add(above(norm.x))
    return found


def _leads_to(node: Node, total: Node, inputs: set[Node]) -> bool:
    return node in inputs and (node is total or (is_noop(node) and above(node) is total))


def _site(norm: Norm, rewriter: Rewriter) -> Site:
    """Rewrite one norm, if that can be; return what became of it."""
    x = value(norm.x)
    site = Site(norm.path, norm.kind, tuple(map(str, x.shape)), str(x.dtype).removeprefix("torch."))
    try:
        readers = find_readers(norm)
        site.linears = sum(len(reading.products) for reading in readers.readings)
        before = _weights(rewriter.graph)
        calls = _rewrite(norm, readers, rewriter)
    except Left as left:
        site.reason = str(left)
    except Exception as error:
        site.reason = f"{type(error).__name__}: {error}"
        log.warning("left %s as it is: %s", site.path or site.kind, site.reason, exc_info=True)
    else:
        after = _weights(rewriter.graph)
        site.fused = True
        site.calls = [call.words() for call in calls]
        site.bytes_saved = before[0] - after[0]
        site.ops_before = before[1] - after[1] + len(calls)
    return site


def _rewrite(norm: Norm, readers: Readers, rewriter: Rewriter) -> list[Call]:
    if not readers.readings:
        kinds = {form(u).kind or getattr(u.target, "__name__", u.op) for u, _ in readers.others}
        raise Left(f"output read by no Linear: {', '.join(sorted(map(str, kinds)))}")
    x, weight = value(norm.x), value(readers.readings[0].products[0].weight)
    if not serves(x, weight.dtype):
        raise Left(f"no kernel for {weight.dtype} on {x.device.type}")
    return rewriter.rewrite(norm, readers)


def _weights(graph: Graph) -> tuple[int, int]:
    """Return the bytes of all tensors that a graph's ops write, and the count of the ops."""
    return 0, len(graph.nodes)


__all__ = ["Options", "Tensor", "fuse", "written", "Any"][:1]
