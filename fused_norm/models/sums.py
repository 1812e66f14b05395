"""Residual sums after Linear layers, or gates on these, which the layers' products can add."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import Node

from fused_norm.functional import linear_add
from fused_norm.models.calls import Left
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow, reads
from fused_norm.models.forms import above, form
from fused_norm.models.layouts import fitted
from fused_norm.models.norms import module_path
from fused_norm.models.precision import Precision
from fused_norm.models.readers import Product, find_product, residual_of, spreads
from fused_norm.models.sites import RESIDUAL, Site
from fused_norm.models.values import are_same, dtype, is_plain, is_tensor, shape, value
from fused_norm.models.writes import written
from fused_norm.ops.linear_gated_add import groups_of
from fused_norm.ops.operands import hint


@dataclass
class Sum:
    """A sum that a Linear layer's product can add.

    Attributes:
        total: Its node.
        x: The layer's input.
        product: The layer.
        residual: What is added.
        inner: All nodes of the layer and the sum.
        gate: What multiplies the layer's result, or None.
    """

    total: Node
    x: Node
    product: Product
    residual: Node
    inner: set[Node]
    gate: Node | None = None

    def groups(self) -> int:
        """Return how many groups of rows have a gate each, 0 without one or if it is of columns."""
        if self.gate is None:
            return 0
        sizes = [list(map(hint, shape(node))) for node in (self.gate, self.total)]
        return groups_of(*sizes)


def find_sums(flow: Flow, pays: Callable[[Sum], bool]) -> list[Sum]:
    """Return the sums of a graph that products should add, in its order.

    Args:
        flow: What is known of the graph.
        pays: Returns whether a sum's product should add it.
    """
    sums = [node for node in flow.graph.nodes if form(node).kind in ("add", "addcmul")]
    found = [_find_sum(node, flow) for node in sums]
    return [s for s in found if s and pays(s)]


def _find_sum(total: Node, flow: Flow) -> Sum | None:
    """Return the sum of a node, None if a call would not compute the same."""
    if flow.is_write_seen(total):
        return None
    for end, residual, gate, nodes in _summands(total):
        start = above(end, casts=False)
        x = form(start)["input"]
        product = find_product(start, x) if isinstance(x, Node) else None
        if product is None or product.out is not start or product.is_transposed:
            continue
        inner = {total, start, *nodes}
        while end is not start:
            inner.add(end)
            end = form(end)["input"]
        given = (x, product.weight, product.bias, residual, gate)
        operands = [v for v in given if isinstance(v, Node)]
        # An FP8 weight was checked when its layer was recognized.
        plain = [v for v in operands if v is not product.weight or product.recipe is None]
        if (
            all(set(node.users) <= inner for node in inner - {total})
            and {dtype(v) for v in operands} == {dtype(total)}
            and all(is_plain(value(v)) for v in plain)
            and len(shape(x)) > 1
            and not (
                gate
                and flow.records_gradients(total)
                and any(value(v).requires_grad for v in operands)
            )
            and flow.are_under_same_modes([start, total])
            and flow.are_recorded_alike(reads(inner, operands))
            and not flow.is_written(operands, min(reads(inner, operands)), total)
        ):
            return Sum(total, x, product, residual, inner, gate)
    return None


def _summands(total: Node) -> Iterator[tuple[Node, Node, Node | None, set[Node]]]:
    """Yield what may be a layer's result, what is added to it, its gate, and the gate's nodes."""
    f = form(total)
    if f.kind == "addcmul":
        residual, *factors = f["input"], f["tensor1"], f["tensor2"]
        if f.args.get("value", 1) == 1 and not written(total):
            yield from _gated(total, total, residual, *factors)
        return
    found = residual_of(total)
    if found is None or found[2] is not total:
        return
    # The later layer adds the result of the earlier one.
    pairs = sorted((found[:2], found[1::-1]), reverse=True)
    for end, residual in pairs:
        yield end, residual, None, set()
    for end, residual in pairs:
        node = above(end, casts=False)
        f = form(node)
        if f.kind == "mul" and not written(node):
            yield from _gated(total, node, residual, f["input"], f["other"])


def _gated(
    total: Node, node: Node, residual: Any, *factors: Any
) -> Iterator[tuple[Node, Node, Node | None, set[Node]]]:
    """Yield the same of a product of two factors, the gate in either place."""
    if not all(map(is_tensor, (residual, *factors))):
        return
    for end, gate in (factors, factors[::-1]):
        are_rows = all(are_same(shape(v), shape(total)) for v in (end, residual))
        if are_rows and end is not gate and spreads(gate, total):
            yield end, residual, gate, {node}


def add_in_product(total: Node, emitter: Emitter, precision: Precision) -> Site | None:
    """Let a product add; return the sum's site, None if it stays.

    Args:
        total: The node of a sum that was found before others were rewritten.
        emitter: Adds nodes to the graph.
        precision: Which Linear layers are in FP8.
    """
    found = None if total._erased else _find_sum(total, emitter.flow)
    if found is None:
        return None
    product = found.product
    emit = partial(emitter.emit, product.node)
    recipe, words = precision.of_call([product])
    emitter.made.clear()
    with emitter.graph.inserting_before(total):
        arguments = (found.x, product.weight, product.bias, found.residual)
        options = {} if found.gate is None else {"gate": found.gate}
        # A mode decides nothing when the graph runs.
        pair = emit(linear_add, *arguments, **options, normalization=None, recipe=recipe or "")
        try:
            result = fitted(total, emit(operator.getitem, pair, 0), emit)
        except Left:
            emitter.forget()
            return None
    site = Site(module_path(product.node), RESIDUAL).describe(value(found.x))
    site.linears, site.implementation = 1, words or "kernels"
    site.calls = ["linear_add" if found.gate is None else "linear_add: gate"]
    emitter.replace(total, result, found.inner, [result], site)
    return site
