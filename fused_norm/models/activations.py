"""What follows a Linear layer: an activation, a gate, a second Linear layer and its residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from fused_norm.activations import GATES, PLAIN
from fused_norm.models.forms import above, below, form, is_noop, is_plain_sum, only_user, other
from fused_norm.models.readers import Product, find_product
from fused_norm.models.values import (
    are_same,
    computed,
    dtype,
    is_number,
    is_tensor,
    number,
    shape,
    value,
)
from fused_norm.models.writes import written

# The ops that activations are written with; no known formula has more nodes than this.
_FORMULA = {"mul", "add", "sub", "pow", "tanh", "erf", "sigmoid", "div"}
_LONGEST_FORMULA = 12


@dataclass
class Activated:
    """Linear layers on a norm, and the activation or the gate on what they return.

    Attributes:
        name: One of ACTIVATIONS.
        products: The layer; for a gate on two layers the gate's, then the other.
        out: The result.
        inner: All nodes of the activation.
        is_swapped: Whether the gate is the second half of a single layer.
        second: The Linear layer that reads the result, or None.
        residual: What is added to its result, or None.
        simpler: The same without the last step, None if that is the activation.
    """

    name: str
    products: list[Product]
    out: Node
    inner: set[Node] = field(default_factory=set)
    is_swapped: bool = False
    second: Product | None = None
    residual: Any = None
    simpler: Activated | None = None


def find_activated(products: Sequence[Product]) -> Activated | None:
    """Return the activation at the end of all of some Linear layers; None if there is none.

    Args:
        products: One or two that read the same rows.
    """
    if len(products) == 1:
        return _plain(products[0]) or _halves(products[0])
    if len(products) != 2:
        return None
    for gate, up in (products, products[::-1]):
        if found := _gated(gate.out, up.out):
            name, end, inner = found
            return Activated(name, [gate, up], end, inner)
    return None


def with_second(activated: Activated, may_add: Any) -> Activated:
    """Return an activation with the Linear layer that is its only reader, if there is one.

    Args:
        activated: The activation.
        may_add: Called with a sum; returns whether it may be fused as well.
    """
    node = below(activated.out)
    reader = only_user(node)
    second = None if reader is None else find_product(reader, node)
    if second is None or second.recipe != activated.products[0].recipe:
        return activated
    inner = activated.inner | _between(activated.out, node) | second.inner
    found = replace(activated, second=second, inner=inner, out=second.out, simpler=activated)
    end = below(second.out)
    total = only_user(end)
    if total is None or not is_plain_sum(total) or not may_add(total):
        return found
    added = other(total, end)
    if not is_tensor(added) or not are_same(shape(added), shape(end)):
        return found
    if dtype(added) is not dtype(end):
        return found
    inner = inner | _between(second.out, end) | {total}
    return replace(found, residual=added, inner=inner, out=total, simpler=found)


def _between(first: Node, last: Node) -> set[Node]:
    """Return the nodes between two that leave values unchanged, without the first."""
    nodes = set()
    while last is not first:
        nodes.add(last)
        last = form(last)["input"]
    return nodes


def _is_product_of(node: Any, a: Node, b: Node) -> bool:
    f = form(node)
    if f.kind != "mul" or written(node) or not is_tensor(other(node, a)):
        return False
    return above(other(node, a), casts=False) is b and are_same(shape(a), shape(b))


def _leads_only_to(node: Node, end: Any) -> bool:
    """Return whether another node is the only reader of a node, through no-ops."""
    while (user := only_user(node)) is not end:
        if user is None or not is_noop(user):
            return False
        node = user
    return True


def _plain(product: Product) -> Activated | None:
    """Return the activation that is the only reader of a Linear layer."""
    found = named_activation(product.out)
    if found is None:
        return None
    name, out, inner = found
    return Activated(name, [product], out, inner)


def _halves(product: Product) -> Activated | None:
    """Return the gate in which one half of a Linear layer's result multiplies the other."""
    parts = only_user(below(product.out))
    f = form(parts)
    if parts is None or f.kind not in ("chunk", "split"):
        return None
    if f["input"] is not below(product.out):
        return None
    if f.args.get("dim", 0) not in (-1, value(product.out).dim() - 1):
        return None
    halves = sorted(parts.users, key=lambda node: str(form(node)["index"]))
    if len(halves) != 2 or [form(half)["index"] for half in halves] != [0, 1]:
        return None
    if len(value(parts)) != 2 or not are_same(shape(halves[0])[-1], shape(halves[1])[-1]):
        return None
    for gate, up in (halves, halves[::-1]):
        if found := _gated(gate, up):
            name, end, inner = found
            inner |= {parts, *halves} | _between(product.out, below(product.out))
            return Activated(name, [product], end, inner, gate is halves[1])
    return None


def _gated(gate: Node, up: Node) -> tuple[str, Node, set[Node]] | None:
    """Return the name, the result and the nodes of an activation of one node times another."""
    found = named_activation(gate)
    if found is None or found[0] not in GATES:
        return None
    name, out, inner = found
    node = below(out)
    end = only_user(node)
    if end is None or not _is_product_of(end, node, up) or not _leads_only_to(up, end):
        return None
    return GATES[name], end, inner | _between(out, node) | {end}


def named_activation(node: Node) -> tuple[str, Node, set[Node]] | None:
    """Return the name, the result and the nodes of an activation that is a node's only reader.

    Args:
        node: The input of the activation.
    """
    user = only_user(node)
    f = form(user)
    if user is not None and f["input"] is node:
        name = f.kind
        if name == "gelu":
            how = f.args.get("approximate", "none")
            name = {"none": "gelu", "tanh": "gelu_tanh"}.get(how, "")
        if name in PLAIN and not _is_squared(user):
            return name, user, {user}
    return _formula(node)


def _is_squared(node: Node) -> bool:
    """Return whether a ReLU is squared, which is not a known activation."""
    user = only_user(node)
    f = form(user)
    return f.kind == "square" or (f.kind == "pow" and is_number(f["exponent"], 2.0))


def _formula(node: Node) -> tuple[str, Node, set[Node]] | None:
    """Return the activation that is written out in formulas of one node and numbers alone.

    Its nodes are found by following readers, its name by evaluating it.
    """
    region: set[Node] = set()
    ahead = list(node.users)
    while ahead:
        user = ahead.pop()
        if user in region or len(region) > _LONGEST_FORMULA:
            continue
        if form(user).kind not in _FORMULA or written(user):
            continue
        if any(
            v is not node and v not in region and number(v) is None for v in user.all_input_nodes
        ):
            continue
        region.add(user)
        ahead += list(user.users)
    if not any(form(each).kind in ("tanh", "erf", "sigmoid") for each in region):
        return None
    # A formula whose operands are visited in another order is found again from its other end.
    ends = [each for each in region if any(user not in region for user in each.users)]
    if len(ends) != 1 or any(user not in region for user in node.users):
        return None
    points = torch.linspace(-4.0, 4.0, 33, dtype=torch.float64)
    values = _values(sorted(region), node, points, ends[0])
    for name, known in PLAIN.items():
        expected = known.function(points)
        if values is not None and torch.allclose(values, expected, rtol=0.0, atol=1e-6):
            return name, ends[0], region
    return None


def _values(region: Sequence[Node], node: Node, points: Any, end: Node) -> Any:
    """Return a formula's values at some points, None if its nodes cannot be run."""
    known: dict[Node, Any] = {node: points}
    for each in region:
        try:
            known[each] = computed(each, lambda n: known.get(n, number(n)))
        except (TypeError, RuntimeError):
            return None
    return known[end]
