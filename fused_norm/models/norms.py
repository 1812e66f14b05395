"""Finds norms in a graph: called as one op, or written out, with what multiplies and is added."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from fused_norm.call.memory import own_eps
from fused_norm.models.forms import (
    above,
    form,
    is_cast,
    is_last,
    is_narrowed,
    is_narrowing,
    is_noop,
    is_plain_sum,
    only_user,
    other,
    pair,
)
from fused_norm.models.values import dtype, is_number, is_tensor, is_vector, number, shape, value
from fused_norm.models.writes import written
from fused_norm.norms import LAYER_NORM, NORMS, RMS_NORM


@dataclass
class Norm:
    """A norm over the last dimension.

    Attributes:
        kind: One of NORMS.
        x: What is normalized.
        eps: Added to the variance, or to the mean square.
        out: The result, with gamma and beta.
        anchor: The node that says which module the norm is in.
        inner: All nodes that are the norm.
        gamma: The weight, or None for ones.
        offset: Added to gamma.
        beta: The bias, or None for zeros.
        is_rounded: Whether the model rounds in the midst of it: before gamma or beta, or to a dtype
            that it leaves again.
    """

    kind: str
    x: Node
    eps: float
    out: Node
    anchor: Node
    inner: set[Node] = field(default_factory=set)
    gamma: Any = None
    offset: float = 0.0
    beta: Any = None
    is_rounded: bool = False

    @property
    def path(self) -> str:
        """Path of the module that the norm is, or is written in."""
        return module_path(self.anchor)


def find_norm(node: Node) -> Norm | None:
    """Return the norm that a node stands for: the op, or its reciprocal root.

    Args:
        node: Any node of a graph.
    """
    kind = form(node).kind
    if kind in NORMS:
        norm = _called(node)
    elif kind in ("rsqrt", "sqrt") or (kind == "pow" and is_number(form(node)["exponent"], -0.5)):
        norm = _written_out(node, kind)
    else:
        return None
    if norm is None or not is_tensor(norm.x) or not value(norm.x).is_floating_point():
        return None
    _take_in_affine(norm)
    _take_in_casts(norm)
    return norm


def candidates(graph: Graph) -> list[Node]:
    """Return the nodes of a graph that may stand for norms."""
    kinds = {*NORMS, "rsqrt", "sqrt", "pow"}
    return [node for node in graph.nodes if form(node).kind in kinds]


def _called(node: Node) -> Norm | None:
    f = form(node)
    features = f["normalized_shape"]
    if not isinstance(features, (tuple, list)) or len(features) != 1 or not is_tensor(f["input"]):
        return None
    eps = f.args.get("eps", NORMS[f.kind].eps)
    # Said once and for all: the rows that a call takes may be narrower than those here.
    exact = own_eps(dtype(f["input"])) if eps is None else number(eps)
    if exact is None:
        return None
    norm = Norm(f.kind, f["input"], exact, node, node, {node}, beta=f["bias"])
    norm.is_rounded = is_narrowed(f["weight"])
    if f["weight"] is not None:
        norm.gamma, norm.offset = _gamma(f["weight"], features[0]) or (f["weight"], 0.0)
    return norm


def _written_out(root: Node, kind: str) -> Norm | None:
    """Return the norm around the reciprocal root of a mean square or a variance, and eps."""
    total = form(root)["input"]
    if not is_plain_sum(total):
        return None
    spread, added = pair(total)
    eps = number(added)
    if eps is None or not is_tensor(spread):
        return None
    found = _mean_square(spread) or _variance(spread)
    product = only_user(root)
    if found is None or product is None or written(product):
        return None
    x, is_centered, inner = found
    if form(product).kind != ("div" if kind == "sqrt" else "mul"):
        return None
    if kind == "sqrt" and form(product)["other"] is not root:
        return None
    rows = other(product, root)
    if is_centered:
        centered = _centered(rows)
        if centered is None or above(centered[0]) is not above(x):
            return None
        inner |= centered[1]
    elif above(rows) is not above(x):
        return None
    # The rows as they are multiplied: a model may square a wider copy of them.
    x = rows if is_tensor(rows) and not is_centered else x
    name = LAYER_NORM if is_centered else RMS_NORM
    norm = Norm(name, x, eps, product, product, {root, total, product, *inner})
    norm.is_rounded = any(map(is_narrowed, (found[0], rows, x)))
    return norm


def _mean_square(node: Any) -> tuple[Node, bool, set[Node]] | None:
    f = form(node)
    if f.kind != "mean":
        return None
    squares = f["input"]
    g = form(squares)
    is_square = (
        g.kind == "square"
        or (g.kind == "pow" and is_number(g["exponent"], 2.0))
        or (g.kind == "mul" and g["input"] is g["other"])
    )
    rows = g["input"]
    if written(squares) or not is_square or not is_tensor(rows) or not is_last(node, rows):
        return None
    centered = _centered(rows)
    if centered is not None:
        return centered[0], True, {node, squares, *centered[1]}
    return rows, False, {node, squares}


def _variance(node: Any) -> tuple[Node, bool, set[Node]] | None:
    f = form(node)
    if f.kind != "var" or not is_tensor(f["input"]) or not is_last(node, f["input"]):
        return None
    is_biased = f["unbiased"] is False or f.args.get("correction", 1) == 0
    return (f["input"], True, {node}) if is_biased else None


def _centered(node: Any) -> tuple[Node, set[Node]] | None:
    """Return x and the nodes of x - x.mean(-1, keepdim=True)."""
    node = above(node)
    f = form(node)
    if f.kind != "sub" or written(node):
        return None
    x, mean = f["input"], f["other"]
    g = form(mean)
    if g.kind != "mean" or not is_tensor(x) or above(g["input"]) is not above(x):
        return None
    return (x, {node, mean}) if is_last(mean, g["input"]) else None


def _gamma(node: Any, features: Any) -> tuple[Node, float] | None:
    """Return the vector and the offset of w, or of 1 + w; None where it is no vector."""
    if not is_vector(node, features):
        return None
    vector = above(node)
    if is_plain_sum(vector):
        weight, one = pair(vector)
        if is_number(one, 1.0):
            return above(weight), 1.0
    return vector, 0.0


def _take_in_affine(norm: Norm) -> None:
    """Take in the casts, gamma and beta that follow."""
    features = shape(norm.out)[-1]
    widest, is_narrow = dtype(norm.out).itemsize, False
    while (user := only_user(norm.out)) is not None and not written(user):
        f = form(user)
        if is_noop(user) or is_cast(user):
            # What was rounded to is wide again: the rounding would be seen.
            norm.is_rounded |= is_narrow and not is_noop(user)
            is_narrow |= is_narrowing(user)
            norm.out = user
            norm.inner.add(user)
            continue
        operand = other(user, norm.out) if f.kind in ("mul", "add") else None
        found = _gamma(operand, features)
        if found is None or norm.beta is not None:
            break
        if f.kind == "mul" and norm.gamma is None:
            norm.gamma, norm.offset = found
        elif f.kind == "add" and found[1] == 0.0 and f.args.get("alpha", 1) == 1:
            norm.beta = found[0]
        else:
            break
        norm.is_rounded |= is_narrowed(operand) or dtype(norm.out).itemsize < max(widest, 4)
        norm.out = user
        norm.inner.add(user)


def _take_in_casts(norm: Norm) -> None:
    """Let x be what the casts before a norm widen, if that has the dtype of the result."""
    best = node = norm.x
    passed: set[Node] = set()
    while is_noop(node) or (
        is_cast(node) and dtype(node).itemsize >= dtype(form(node)["input"]).itemsize
    ):
        passed.add(node)
        node = form(node)["input"]
        if dtype(node) == dtype(norm.out) or dtype(best) != dtype(norm.out):
            best = node
            norm.inner |= passed
            passed = set()
    norm.x = best


def module_path(node: Node) -> str:
    """Return the path of the module that a node was traced in, `""` for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?", "", path).replace("__dict__.", "")
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    return re.sub(r"(^|\.)_modules\.", r"\1", path).lstrip(".")
