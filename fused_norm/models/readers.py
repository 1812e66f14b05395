"""Readers of a norm's rows: Linear layers, through casts, views and modulation, and others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.fx import Node

from fused_norm.models.forms import (
    above,
    form,
    is_cast,
    is_narrowing,
    is_noop,
    is_plain_sum,
    only_user,
    other,
    pair,
)
from fused_norm.models.norms import Norm
from fused_norm.models.values import are_same, is_number, is_tensor, shape, value
from fused_norm.models.views import VIEWS, column_after
from fused_norm.models.writes import written

_SHAPE_ONLY = {"size", "dim", "numel", "new_zeros", "new_ones", "new_empty", "new_full"}
_SHAPE_ONLY |= {"zeros_like", "ones_like", "empty_like"}


@dataclass
class Product:
    """A Linear layer.

    Attributes:
        node: The node that multiplies.
        weight: Shape `[N, K]`, or `[K, N]` if it is transposed.
        bias: Shape `[N]`, or None.
        is_transposed: Whether the weight is.
        out: The result, in the shape of the rows.
        inner: All nodes of the layer.
        recipe: The FP8 recipe in which the model has it, or None.
    """

    node: Node
    weight: Node
    bias: Any
    is_transposed: bool
    out: Node
    inner: set[Node] = field(default_factory=set)
    recipe: str | None = None


class Modulation(NamedTuple):
    """AdaLN's z * (1 + scale) + shift.

    Attributes:
        scale: Before one is added, and before the views below.
        scale_views: Views between scale + 1 and the product.
        shift: Or None.
        start: Its first node.
    """

    scale: Any
    scale_views: tuple[Node, ...]
    shift: Any
    start: Node


@dataclass
class Reading:
    """Linear layers that read a norm through the same nodes.

    Attributes:
        source: Their input.
        views: Views between the norm and the layers, in order.
        modulation: The one between the norm and the layers, or None.
        inner: All nodes between.
        products: The layers.
        is_rounded: Whether a cast between them rounds.
    """

    source: Node
    views: tuple[Node, ...] = ()
    modulation: Modulation | None = None
    inner: set[Node] = field(default_factory=set)
    products: list[Product] = field(default_factory=list)
    is_rounded: bool = False


class Readers(NamedTuple):
    """All readers of a norm.

    Attributes:
        readings: Linear layers.
        others: Other readers, each with its input, including a node between.
        shapes: Nodes that need only its shape, dtype and layout, each with its input and the path.
        beyond: Linear layers that read it as part of a concatenation, and whether that is of rows.
    """

    readings: list[Reading]
    others: list[tuple[Node, Node]]
    shapes: list[tuple[Node, Node, list[Node]]]
    beyond: list[tuple[Product, bool]]


def find_readers(norm: Norm) -> Readers:
    """Return all readers of a norm.

    Args:
        norm: The norm.
    """
    found: dict[tuple[Any, ...], Reading] = {}
    others: list[tuple[Node, Node]] = []
    shapes: list[tuple[Node, Node, list[Node]]] = []
    beyond: list[tuple[Product, bool]] = []

    def walk(reading: Reading, key: tuple[Any, ...], column: int) -> bool:
        """Follow the readers of one node; features are at `column` of its dimensions.

        Returns whether a Linear layer is among them; nodes that lead to none are other readers.
        """
        source = reading.source
        is_row = column == value(source).dim() - 1
        leads = False
        for user in list(source.users):
            if user in norm.inner:
                continue
            product = find_product(user, source) if is_row else None
            if product is not None:
                # Layers of one recipe are computed together.
                alike = (*key, product.recipe)
                group = found.setdefault(alike, _beyond(reading, source, set()))
                group.inner |= reading.inner
                group.products.append(product)
                leads = True
                continue
            mark = len(others), len(shapes)
            arrives = False
            if written(user):
                pass
            elif is_noop(user) or is_cast(user):
                step = () if is_noop(user) else (value(user).dtype,)
                through = _beyond(reading, user, {user})
                through.is_rounded |= is_narrowing(user)
                arrives = walk(through, key + step, column)
            elif is_row and reading.modulation is None and (m := find_modulation(user, source)):
                modulation, end, inner = m
                through = _beyond(reading, end, inner)
                through.modulation = modulation
                arrives = walk(through, (*key, end), column)
            elif (after := column_after(user, source, column)) is not None:
                through = _beyond(reading, user, {user})
                through.views = (*reading.views, user)
                arrives = walk(through, (*key, _how(user)), after)
            if form(user).kind == "cat" and is_tensor(user):
                layers = [find_product(each, user) for each in user.users]
                is_rows = form(user).args.get("dim", 0) % value(user).dim() != column
                beyond.extend((layer, is_rows) for layer in layers if layer is not None)
            if not arrives:
                del others[mark[0] :], shapes[mark[1] :]
                is_shape = getattr(user.target, "__name__", user.target) in _SHAPE_ONLY
                if is_shape and reading.modulation is None and not written(user):
                    shapes.append((user, source, sorted(reading.inner)))
                else:
                    others.append((user, source))
            leads |= arrives
        return leads

    walk(Reading(norm.out), (), value(norm.out).dim() - 1)
    return Readers(list(found.values()), others, shapes, beyond)


def _how(view: Node) -> tuple[Any, ...]:
    """Return what a view does to its input, the same for views that do the same."""
    closed_over = getattr(view.target, "__closure__", None)
    if closed_over is None:
        return view.target, str(view.args[1:]), str(view.kwargs)
    # In PyTorch 2.11, each call has its own closure.
    return form(view).kind, *(repr(cell.cell_contents) for cell in closed_over)


def _beyond(reading: Reading, source: Node, inner: set[Node]) -> Reading:
    return replace(reading, source=source, inner=reading.inner | inner, products=[])


def find_product(node: Node, source: Node) -> Product | None:
    """Return the Linear layer of a node that reads some rows; None if it is not one.

    Args:
        node: A reader of the rows.
        source: The rows.
    """
    f = form(node)
    if f.kind == "linear" and f["input"] is source:
        weight, bias = above(f["weight"], casts=False), above(f["bias"], casts=False)
        if _is_matrix(weight) and weight is not source and bias is not source:
            return Product(node, weight, bias, False, node, {node})
    if f.kind == "scaled_linear" and f["input"] is source:
        return Product(node, f["weight"], f["bias"], False, node, {node}, f["recipe"])
    if f.kind == "addmm" and f["mat1"] is source:
        is_plain = f.args.get("alpha", 1) == 1 and f.args.get("beta", 1) == 1
        weight, bias = f["mat2"], f["input"]
        if is_plain and weight is not source and is_tensor(bias) and value(bias).dim() == 1:
            return _upright(Product(node, weight, bias, True, node, {node}))
    if f.kind == "matmul" and f["input"] is source and _is_parameter(f["other"]):
        return _upright(Product(node, f["other"], None, True, node, {node}))
    # Conv1D: rows are reshaped to a matrix, multiplied, and the result is reshaped back.
    if f.kind == "view" and value(node).dim() == 2 and value(source).dim() > 2:
        flat = only_user(node)
        product = None if flat is None else find_product(flat, node)
        if product is not None and are_same(shape(node)[-1], shape(source)[-1]):
            end = only_user(product.out)
            rows = (*shape(source)[:-1], shape(product.out)[-1])
            if end is not None and form(end).kind == "view" and are_same(tuple(shape(end)), rows):
                product.out = end
                product.inner |= {node, end}
                return product
    return None


def _upright(product: Product) -> Product:
    """Return the same with the original weight, if the model transposed it."""
    f = form(product.weight)
    is_turned = f.kind in ("t", "transpose") and is_tensor(f["input"])
    if is_turned and value(f["input"]).dim() == 2:
        product.weight, product.is_transposed = f["input"], False
    return product


def _is_matrix(node: Any) -> bool:
    return is_tensor(node) and value(node).dim() == 2


def _is_parameter(node: Any) -> bool:
    """Return whether a matrix is computed from the graph's inputs alone."""
    if not _is_matrix(node):
        return False
    while form(node).kind in ("t", "transpose", "cast", "permute"):
        node = form(node)["input"]
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


def find_modulation(node: Node, source: Node) -> tuple[Modulation, Node, set[Node]] | None:
    """Return the modulation that begins at a node, its last node, and all its nodes, or None.

    Args:
        node: A reader of the rows.
        source: The rows.
    """
    f = form(node)
    if f.kind != "mul" or not are_same(shape(node), shape(source)):
        return None
    scale, views = other(node, source), []
    while form(scale).kind in VIEWS and not is_noop(scale):
        views.append(scale)
        scale = form(scale)["input"]
    if not is_plain_sum(scale) or not spreads(other(node, source), source):
        return None
    vector, one = pair(scale)
    if not is_tensor(vector) or not is_number(one, 1.0):
        return None
    end, shift = node, None
    total = only_user(node)
    if total is not None and is_plain_sum(total) and spreads(other(total, node), source):
        end, shift = total, other(total, node)
    modulation = Modulation(vector, tuple(reversed(views)), shift, node)
    return modulation, end, {node, end}


def spreads(node: Any, source: Node) -> bool:
    """Return whether a tensor broadcasts against rows, feature by feature.

    Args:
        node: The tensor, or another argument.
        source: The rows.
    """
    if not is_tensor(node):
        return False
    own, rows = shape(node), shape(source)
    if not 0 < len(own) <= len(rows) or not are_same(own[-1], rows[-1]):
        return False
    leading = zip(own[::-1], rows[::-1], strict=False)
    return all(are_same(size, 1) or are_same(size, whole) for size, whole in leading)


def residual_of(x: Node) -> tuple[Node, Node, Node] | None:
    """Return a, b and the node of their sum if rows are a + b of one shape and dtype.

    Args:
        x: The input of a norm.
    """
    total = x
    while is_noop(total) and form(total).kind != "clone":
        total = form(total)["input"]
    f = form(total)
    if f.kind != "add" or f.args.get("alpha", 1) != 1:
        return None
    a, b = f["input"], f["other"]
    if not (is_tensor(a) and is_tensor(b)) or a is b:
        return None
    like = (value(total).dtype, value(total).device)
    if not all((value(v).dtype, value(v).device) == like for v in (a, b)):
        return None
    if not all(are_same(shape(v), shape(x)) for v in (a, b, total)):
        return None
    return a, b, total
