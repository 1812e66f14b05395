"""The spread of rows, however a model computes it: what a decomposed norm divides by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from fused_norm.models.forms import above, form, is_last, is_plain_sum, pair
from fused_norm.models.values import is_number, is_tensor, number, shape, value
from fused_norm.models.writes import written

# Rows as short as a larger bound may matter, and come out by up to a third shorter.
_LARGEST_BOUND = 1e-4


def bounded(least: float) -> str:
    """Return why a norm that divides by the larger of length and a bound is another one.

    Args:
        least: The bound. Our norm adds its square to that of the length instead.

    Returns:
        The reason, `""` if only rows differ that are too short to matter.
    """
    is_short = abs(least) <= _LARGEST_BOUND
    return "" if is_short else f"lengths below {least:g} count as {least:g}"


@dataclass(frozen=True)
class Spread:
    """A variance or a mean square, times a factor, plus eps.

    Attributes:
        x: The rows.
        is_centered: Whether it is the variance.
        inner: All its nodes.
        times: The factor: K for a sum of squares, K / (K - 1) for the unbiased variance.
        added: What is added to it.
        unlike: Why it is not a sum like that, `""` if it is.
    """

    x: Node
    is_centered: bool
    inner: frozenset[Node]
    times: float = 1.0
    added: float = 0.0
    unlike: str = ""

    @property
    def factor(self) -> float:
        """The ratio of the reciprocal root to that of the spread itself."""
        return 1.0 / math.sqrt(self.times)

    @property
    def eps(self) -> float:
        """What is added to the variance or mean square itself."""
        return self.added / self.times

    def within(self, *nodes: Node) -> Spread:
        """Return the same with more nodes."""
        return replace(self, inner=self.inner.union(nodes))


def find_root(node: Any, product: Node) -> Spread | None:
    """Return the spread whose root divides rows, None if there is none.

    Args:
        node: An operand of the product.
        product: The node that multiplies by the reciprocal root, or divides by the root.
    """
    f = form(node)
    if form(product).kind == "div":
        if form(product)["other"] is not node or form(product)["rounding_mode"]:
            return None
        return _root(node)
    is_reciprocal = f.kind == "rsqrt" or (f.kind == "pow" and is_number(f["exponent"], -0.5))
    found = _sum(f["input"]) if is_reciprocal and not written(node) else None
    return found and found.within(node)


def _root(node: Any) -> Spread | None:
    """Return the spread that a node is the root of."""
    f = form(node)
    if not f.kind or written(node):
        return None
    if f.kind == "expand":
        found = _root(f["input"])
    elif f.kind == "sqrt" or (f.kind == "pow" and is_number(f["exponent"], 0.5)):
        found = _sum(f["input"])
    elif f.kind == "clamp":
        least = number(f["min"])
        found = _length(f["input"]) if f["max"] is None and least is not None else None
        least = least or 0.0
        found = found and replace(found, added=least**2, unlike=bounded(least))
    elif is_plain_sum(node):
        deviation, added = pair(node)
        found = _length(deviation) if number(added) is not None else None
        found = found and replace(found, unlike="its eps is added to the root")
    else:
        found = _length(node)
    return found and found.within(node)


def _sum(node: Any) -> Spread | None:
    """Return the spread that a node is, eps included."""
    if not is_plain_sum(node):
        return None
    spread, added = pair(node)
    eps = number(added)
    found = _square(spread) if is_tensor(spread) and eps is not None else None
    return found and replace(found.within(node), added=float(eps or 0.0))


def _square(node: Any) -> Spread | None:
    """Return the spread that a node is, without eps."""
    f = form(node)
    if f.kind in ("mean", "sum"):
        return _mean_square(node)
    if f.kind == "var":
        return _variance(node)
    if f.kind == "getitem" and f["index"] == 0 and form(f["input"]).kind == "var_mean":
        found = _variance(f["input"])
        return found and found.within(node)
    root = squared(node)
    found = None if root is None else _length(root)
    return found and found.within(node)


def _length(node: Any) -> Spread | None:
    """Return the spread whose root is a norm or a standard deviation, without eps."""
    f = form(node)
    if f.kind == "std":
        return _variance(node)
    if f.kind != "vector_norm":
        return None
    x, order = f["input"], f.args.get("ord", f.args.get("p", 2.0))
    is_euclidean = order in (None, "fro") or is_number(order, 2.0)
    if not is_euclidean or not is_tensor(x) or not is_last(node, x) or written(node):
        return None
    features = shape(x)[-1]
    if not isinstance(features, int) or value(node).dtype is not value(x).dtype:
        return None
    return Spread(x, False, frozenset({node}), features)


def squared(node: Any) -> Node | None:
    """Return the node whose square a node is, None if it is not a square."""
    f = form(node)
    is_square = (
        f.kind == "square"
        or (f.kind == "pow" and is_number(f["exponent"], 2.0))
        or (f.kind == "mul" and f["input"] is f["other"])
    )
    found: Any = f["input"] if is_square and not written(node) else None
    return found if is_tensor(found) else None


def _mean_square(node: Any) -> Spread | None:
    f = form(node)
    squares = f["input"]
    rows = squared(squares)
    if rows is None or not is_last(node, rows):
        return None
    features, times = shape(rows)[-1], 1.0
    if f.kind == "sum":
        if not isinstance(features, int):
            return None
        times = float(features)
    inner = {node, squares}
    centered = find_centered(rows)
    if centered is not None:
        return Spread(centered[0], True, frozenset(inner | centered[1]), times)
    return Spread(rows, False, frozenset(inner), times)


def _variance(node: Any) -> Spread | None:
    f = form(node)
    x = f["input"]
    if not is_tensor(x) or not is_last(node, x) or written(node):
        return None
    own = 0 if f["unbiased"] is False else 1
    given = f.args.get("correction", own)
    correction = own if given is None else number(given)
    features = shape(x)[-1]
    if correction == 0:
        return Spread(x, True, frozenset({node}))
    if correction is None or not isinstance(features, int) or features <= correction:
        return None
    return Spread(x, True, frozenset({node}), features / (features - correction))


def find_centered(node: Any) -> tuple[Node, set[Node]] | None:
    """Return x and the nodes of x - x.mean(-1, keepdim=True), None for other nodes.

    Args:
        node: Any node.
    """
    node = above(node)
    f = form(node)
    if f.kind != "sub" or f.args.get("alpha", 1) != 1 or written(node):
        return None
    x, mean = f["input"], f["other"]
    g, inner = form(mean), {node, mean}
    if g.kind == "getitem" and g["index"] == 1 and form(g["input"]).kind == "var_mean":
        inner.add(g["input"])
        mean, g = g["input"], form(g["input"])
    elif g.kind != "mean":
        return None
    if not is_tensor(x) or above(g["input"]) is not above(x):
        return None
    return (x, inner) if is_last(mean, g["input"]) else None
