"""Residual sums right after Linear layers, which the layers' own products can add."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.fx import Node

from fused_norm.functional import linear_add
from fused_norm.models.calls import Left
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow, reads
from fused_norm.models.forms import above, form
from fused_norm.models.layouts import fitted
from fused_norm.models.norms import module_path
from fused_norm.models.precision import Precision
from fused_norm.models.readers import Product, find_product, residual_of
from fused_norm.models.sites import RESIDUAL, Site
from fused_norm.models.values import dtype, is_plain, shape, value


@dataclass
class Sum:
    """A sum that a Linear layer's product can add.

    Attributes:
        total: Its node.
        x: The layer's input.
        product: The layer.
        residual: What is added.
        inner: All nodes of the layer and the sum.
    """

    total: Node
    x: Node
    product: Product
    residual: Node
    inner: set[Node]


def find_sums(flow: Flow, pays: Callable[[Sum], bool]) -> list[Sum]:
    """Return the sums of a graph that products should add, in its order.

    Args:
        flow: What is known of the graph.
        pays: Returns whether a sum's product should add it.
    """
    found = [_find_sum(node, flow) for node in flow.graph.nodes if form(node).kind == "add"]
    return [s for s in found if s and pays(s)]


def _find_sum(total: Node, flow: Flow) -> Sum | None:
    """Return the sum of a node, None if a call would not compute the same."""
    summands = residual_of(total)
    if summands is None or summands[2] is not total:
        return None
    if flow.is_write_seen(total):
        return None
    # The later layer adds the result of the earlier one.
    for end, residual in sorted((summands[:2], summands[1::-1]), reverse=True):
        start = above(end, casts=False)
        x = form(start)["input"]
        product = find_product(start, x) if isinstance(x, Node) else None
        if product is None or product.out is not start or product.is_transposed:
            continue
        inner = {total, start}
        while end is not start:
            inner.add(end)
            end = form(end)["input"]
        operands = [v for v in (x, product.weight, product.bias, residual) if isinstance(v, Node)]
        # An FP8 weight was checked when its layer was recognized.
        plain = [v for v in operands if v is not product.weight or product.recipe is None]
        if (
            all(set(node.users) <= inner for node in inner - {total})
            and {dtype(v) for v in operands} == {dtype(total)}
            and all(is_plain(value(v)) for v in plain)
            and len(shape(x)) > 1
            and flow.are_under_same_modes([start, total])
            and flow.are_recorded_alike(reads(inner, operands))
            and not flow.is_written(operands, min(reads(inner, operands)), total)
        ):
            return Sum(total, x, product, residual, inner)
    return None


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
        # A mode decides nothing when the graph runs.
        pair = emit(linear_add, *arguments, normalization=None, recipe=recipe or "")
        try:
            result = fitted(total, emit(operator.getitem, pair, 0), emit)
        except Left:
            emitter.forget()
            return None
    site = Site(module_path(product.node), RESIDUAL).describe(value(found.x))
    site.linears, site.calls, site.implementation = 1, ["linear_add"], words or "kernels"
    emitter.replace(total, result, found.inner, [result], site)
    return site
