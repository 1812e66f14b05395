"""The pass: finds every norm of a graph, and fuses it with its readers if possible."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fused_norm.chain.kernels import left_to_pytorch
from fused_norm.models.attention import write_out_attention
from fused_norm.models.calls import Left
from fused_norm.models.costs import count
from fused_norm.models.emit import Emitter
from fused_norm.models.float8_layers import as_scaled_linears, lone_layers
from fused_norm.models.flow import Flow
from fused_norm.models.forms import above, form, is_noop, name
from fused_norm.models.heads import fuse_heads
from fused_norm.models.hooks import keep_hooked
from fused_norm.models.layouts import keep_dense
from fused_norm.models.masks import masks_handed_over
from fused_norm.models.norms import Norm, candidates, find_norm
from fused_norm.models.precision import Precision
from fused_norm.models.readers import Readers, find_readers
from fused_norm.models.rewrite import Rewriter
from fused_norm.models.rotations import fuse_rotations
from fused_norm.models.simpler_attention import simplify_attention
from fused_norm.models.sites import Site
from fused_norm.models.streams import split_streams
from fused_norm.models.sums import Sum, add_in_product, find_sums
from fused_norm.models.timing import Replaced
from fused_norm.models.values import is_tensor, value
from fused_norm.ops.fp8 import adds_in_product as adds_in_fp8
from fused_norm.ops.invariance import is_batch_invariant
from fused_norm.ops.operands import adds_in_product, hint, is_small
from fused_norm.ops.validation import serves

log = logging.getLogger("fused_norm.models")

# Products (M K N) after each norm from which fusing all norms in training takes no longer, and less
# memory: of Qwen3 0.6B 8.7e10, BERT and LLaMA more; a DiT's block, 6.5e10, is faster unfused.
_BUSY_IN_TRAINING = 8 * 10**10


@dataclass(frozen=True)
class Options:
    """Options of a pass.

    Attributes:
        rounding: `"once"`, or `"model"` to keep the model's intermediate rounding.
        small: Whether to fuse even calls for which PyTorch's ops are faster. None adds them, and
            each call decides again which code computes it.
        fp8: The recipe of products in FP8, or None.
        skip: Layers that stay out of FP8, as for `Precision`.
    """

    rounding: str = "once"
    small: bool | None = None
    fp8: str | None = None
    skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        Precision(self.fp8, self.skip)
        if self.rounding not in ("once", "model"):
            raise ValueError(f"rounding must be 'once' or 'model', got {self.rounding!r}")


def fuse(
    module: GraphModule,
    options: Options,
    failures: list[str] | None = None,
    replaced: list[Replaced] | None = None,
    masks: Mapping[Node, Tensor] | None = None,
) -> list[Site]:
    """Rewrite the graph of a module, and those of its checkpoints; return its norms.

    A pass that fails restores the graph, and says so once.

    Args:
        module: The module, recompiled if its graph changed.
        options: The options.
        failures: Receives the reasons why the pass failed on a graph.
        replaced: Receives norms before and after, to be timed.
        masks: Inputs of the graph that are masks whose values are known.
    """
    sites = []
    before = _copied(module.graph)
    try:
        for body, handed in _bodies(module):
            sites += fuse(body, options, failures, replaced, handed)
        sites += fuse_graph(module.graph, options, replaced, masks)
        module.graph.lint()
    except Exception as error:
        # An unforeseen model may break a rewrite in any way: it runs unchanged, with a warning.
        module.graph = before
        fault = f"{type(error).__name__}: {error}"
        _say_failed(fault)
        if failures is not None:
            failures.append(fault)
        return []
    module.recompile()
    return sites


def _copied(graph: Graph) -> Graph:
    copy, nodes = Graph(), dict[Node, Node]()
    copied: Any = copy.graph_copy(graph, nodes, return_output_node=True)
    result, output = copied
    copy.output(result).meta = dict(output.meta)
    copy._codegen = graph._codegen
    for old, new in nodes.items():
        # Where Dynamo found an input, which AOTAutograd asks for.
        if hasattr(old, "_dynamo_source"):
            # Node has no such attribute in its type, which mypy would refuse.
            setattr(new, "_dynamo_source", old._dynamo_source)  # noqa: B010
    return copy


@functools.cache
def _say_failed(words: str) -> None:
    log.warning("a graph runs unchanged because the pass failed: %s", words)


def _bodies(module: GraphModule) -> list[tuple[GraphModule, dict[Node, Tensor]]]:
    """Return the graphs of a module's checkpoints, each with what is known of its masks."""
    nodes = [node for node in module.graph.nodes if _is_body(node, module)]
    if not nodes:
        return []
    flow, found, bodies = Flow(module.graph), dict[Node, Any](), []
    names = Counter(node.target for node in nodes)
    for node in nodes:
        body, handed = getattr(module, str(node.target)), dict[Node, Tensor]()
        if len(node.users) == names[node.target] == 1:
            handed = masks_handed_over(next(iter(node.users)), body.graph, flow, found)
        bodies.append((body, handed))
    return bodies


def _is_body(node: Node, module: GraphModule) -> bool:
    """Return whether a node is the graph of a checkpoint."""
    if node.op != "get_attr" or not isinstance(
        getattr(module, str(node.target), None), GraphModule
    ):
        return False
    names = {getattr(user.target, "__name__", "") for user in node.users}
    return bool(names) and names <= {
        "tag_activation_checkpoint",
        "wrap",
        "wrap_activation_checkpoint",
    }


def fuse_graph(
    graph: Graph,
    options: Options,
    replaced: list[Replaced] | None = None,
    masks: Mapping[Node, Tensor] | None = None,
) -> list[Site]:
    """Rewrite one graph; return its norms.

    Args:
        graph: The graph.
        options: What may be done.
        replaced: As in `fuse`.
        masks: As in `fuse`.
    """
    for node in list(graph.nodes):
        # Under deterministic algorithms, F.pad asks rows for their device while it is traced.
        if node.target is getattr and not node.users:
            graph.erase_node(node)
    if not keep_hooked(graph):
        return _left(graph, "a hook is registered on a tensor that is written, or may be a result")
    emitter = Emitter(graph)
    attention = simplify_attention(emitter.flow, masks or {})
    write_out_attention(emitter)
    keeps_rounding = options.rounding == "model"
    left = as_scaled_linears(Emitter(graph), keeps_rounding)
    heads = fuse_heads(Emitter(graph), options.small)
    turns = fuse_rotations(Emitter(graph), options.small, keeps_rounding)
    emitter = Emitter(graph)
    split_streams(emitter)
    inputs, layers = _fused_inputs(graph)
    precision = Precision(options.fp8, options.skip)
    is_busy = options.small is False and _keeps_a_gpu_busy(graph)
    # Layers on norms become part of other calls.
    adds = functools.partial(_adds, options, precision, is_busy)
    found = [s for s in find_sums(emitter.flow, adds) if s.product.node not in layers]
    sums = {s.total for s in found}
    rewriter = Rewriter(
        emitter,
        keeps_rounding,
        lambda total: any(_leads_to(user, total, inputs) for user in [total, *total.users]),
        sums,
        precision,
        {s.product.node for s in found if s.gate is not None},
        replaced,
    )
    sites = []
    for node in candidates(graph):
        norm = None if node._erased else find_norm(node)
        if norm is not None:
            sites.append(_site(norm, rewriter, options, is_busy))
    added = [add_in_product(total, emitter, precision) for total in sorted(sums)]
    sites += [site for site in added if site is not None]
    sites += lone_layers(graph)
    sites += precision.rewrite_linears(emitter)
    keep_dense(emitter)
    return heads + sites + left + turns + attention


def _left(graph: Graph, reason: str) -> list[Site]:
    """Return the norms of a graph that stays as it is."""
    norms = [norm for norm in map(find_norm, candidates(graph)) if norm is not None]
    return [Site(n.path, n.kind, reason=reason).describe(value(n.x)) for n in norms]


def _fused_inputs(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Return the norms' inputs that Linear layers compute, and those layers."""
    inputs, layers = set(), set()
    for node in candidates(graph):
        norm = find_norm(node)
        if norm is not None and (readings := find_readers(norm).readings):
            inputs.add(above(norm.x))
            layers |= {product.node for reading in readings for product in reading.products}
    return inputs, layers


def _leads_to(node: Node, total: Node, inputs: set[Node]) -> bool:
    return node in inputs and (node is total or (is_noop(node) and above(node) is total))


def _keeps_a_gpu_busy(graph: Graph) -> bool:
    """Return whether a graph keeps a GPU busy for longer than Python needs for its norms.

    Kernels are queued, so that one call's time on the host is hidden behind the kernels of others:
    what counts is the graph, not the call.
    """
    products, last = 0, None
    for node in graph.nodes:
        f = form(node)
        a = f["mat1"] if f.kind == "addmm" else f["input"]
        if f.kind in ("linear", "addmm", "matmul") and is_tensor(node) and is_tensor(a):
            last = value(node)
            products += count(last) * hint(value(a).shape[-1])
    if last is None or last.device.type != "cuda":
        return False
    norms = [norm for norm in map(find_norm, candidates(graph)) if norm is not None]
    each = products // max(len(norms), 1)
    if torch.is_grad_enabled() and last.requires_grad and each < _BUSY_IN_TRAINING:
        return False
    return not is_small(each, last.device, False)


def _site(norm: Norm, rewriter: Rewriter, options: Options, is_busy: bool) -> Site:
    """Rewrite one norm, if possible; return its site."""
    site = Site(norm.path, norm.kind).describe(value(norm.x))
    try:
        readers = find_readers(norm)
        site.linears = sum(len(reading.products) for reading in readers.readings)
        site.linears += len(readers.beyond)
        _refuse(norm, readers)
        slow = _faster_elsewhere(norm, readers, options, is_busy)
        if slow and options.small is False:
            raise Left(slow)
        done = rewriter.rewrite(norm, readers)
    except Left as left:
        site.reason = str(left)
    else:
        site.fused = True
        site.calls = [call.words() for call in done.calls]
        site.implementation = slow or "kernels"
        if words := [call.precision for call in done.calls if call.precision]:
            site.implementation = "; ".join(dict.fromkeys(words))
        site.bytes_saved, site.ops_before, site.ops_after = done[1:4]
        if done.replaced is not None:
            done.replaced.site = site
    return site


def _refuse(norm: Norm, readers: Readers) -> None:
    """Raise the first reason against rewriting a norm.

    Raises:
        Left: If no Linear layer reads it, it is another norm, or there is no kernel.
    """
    if readers.beyond and not readers.readings:
        if all(is_rows for _, is_rows in readers.beyond):
            raise Left("Linear layers read its rows in one tensor with those of others")
        raise Left("Linear layers read it in one row with other features")
    if not readers.readings:
        names = sorted({name(user) for user, _ in readers.others})
        raise Left(f"output read by no Linear: {', '.join(names) or 'nothing'}")
    if norm.unlike:
        raise Left(norm.unlike)
    x, weight = value(norm.x), value(readers.readings[0].products[0].weight)
    if not serves(x, weight.dtype):
        raise Left(f"no kernel for {weight.dtype} on {x.device.type}")


def _adds(options: Options, precision: Precision, is_busy: bool, found: Sum) -> bool:
    """Return whether a Linear layer's product should add a residual."""
    x, weight = value(found.x), value(found.product.weight)
    if options.rounding == "model" and x.dtype.itemsize < 4:
        return False
    recipe = precision.of_call([found.product])[0]
    if found.gate is not None:
        groups = found.groups()
        if recipe is not None or not groups or not adds_in_product(x, weight, groups):
            return False
    elif recipe is not None:
        # The layer is a call of ours in any case, of any size.
        return adds_in_fp8(x, recipe)
    elif not adds_in_product(x, weight):
        return False
    if not serves(x, weight.dtype):
        return False
    follows = torch.is_grad_enabled() and weight.requires_grad
    is_any = options.small is not False or is_busy
    return is_any or not is_small(count(x) * hint(weight.shape[0]), x.device, follows)


def _faster_elsewhere(norm: Norm, readers: Readers, options: Options, is_busy: bool) -> str:
    """Return why PyTorch's ops are faster for a call than ours, `""` if they are not."""
    x = value(norm.x)
    instructions = left_to_pytorch(x.dtype) if x.device.type == "cpu" else None
    if instructions and not is_batch_invariant():
        return f"PyTorch's products of bfloat16 use {instructions} here, and ours do not"
    if options.small or is_busy or not _is_small(norm, readers):
        return ""
    return "PyTorch's ops are faster for a call this small"


def _is_small(norm: Norm, readers: Readers) -> bool:
    """Return whether PyTorch's ops finish before a call of ours starts."""
    x = value(norm.x)
    weights = [value(p.weight) for reading in readers.readings for p in reading.products]
    rows = count(x) // max(hint(x.shape[-1]), 1)
    follows = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
    return is_small(rows * sum(map(count, weights)), x.device, follows)
