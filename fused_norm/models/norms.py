"""Finds norms in a graph, as one op or decomposed, with their factors and summands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fused_norm.call.memory import own_eps
from fused_norm.models.forms import (
    above,
    form,
    is_cast,
    is_narrowed,
    is_narrowing,
    is_noop,
    is_plain_sum,
    only_user,
    other,
    pair,
)
from fused_norm.models.spreads import bounded, find_centered, find_root
from fused_norm.models.values import (
    dtype,
    is_number,
    is_single,
    is_tensor,
    is_vector,
    number,
    shape,
    value,
)
from fused_norm.models.writes import written
from fused_norm.norms import LAYER_NORM, NORMS, RMS_NORM


@dataclass
class Norm:
    """A norm over the last dimension.

    Attributes:
        kind: One of NORMS.
        x: Its input.
        eps: Added to the variance, or to the mean square.
        out: The result, with gamma and beta.
        anchor: The node whose module path is the norm's.
        inner: All nodes of the norm.
        gamma: The weight, or None for ones.
        offset: Added to gamma.
        beta: The bias, or None for zeros.
        factor: A number that multiplies gamma and offset.
        unlike: Why it is not one of NORMS, `""` if it is.
        is_rounded: Whether the model rounds within it: before gamma or beta, or to an intermediate
            dtype.
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
    factor: float = 1.0
    unlike: str = ""
    is_rounded: bool = False

    @property
    def path(self) -> str:
        """Path of the module that the norm is, or that contains its code."""
        return module_path(self.anchor)


def find_norm(node: Node) -> Norm | None:
    """Return the norm of a node: an op, or the product with the reciprocal root.

    Args:
        node: Any node of a graph.
    """
    kind = form(node).kind
    if kind == "group_norm":
        norm = _grouped(node)
    elif kind == "normalize":
        norm = _normalized(node)
    elif kind in NORMS:
        norm = _called(node)
    elif kind in ("mul", "div") and is_tensor(node) and not written(node):
        norm = _written_out(node)
    else:
        return None
    if norm is None or not is_tensor(norm.x) or not value(norm.x).is_floating_point():
        return None
    _take_in_affine(norm)
    _take_in_casts(norm)
    if dtype(norm.x) is not torch.float64 and any(map(_is_wide, norm.inner)):
        norm.unlike = f"computed in torch.float64, and its rows are {dtype(norm.x)}"
    return norm


def _is_wide(node: Node) -> bool:
    return is_tensor(node) and dtype(node) is torch.float64


def candidates(graph: Graph) -> list[Node]:
    """Return the nodes of a graph that may be norms."""
    kinds = {*NORMS, "group_norm", "normalize", "mul", "div"}
    return [node for node in graph.nodes if form(node).kind in kinds]


def _called(node: Node) -> Norm | None:
    f = form(node)
    features = f["normalized_shape"]
    if not isinstance(features, (tuple, list)) or len(features) != 1 or not is_tensor(f["input"]):
        return None
    eps = f.args.get("eps", NORMS[f.kind].eps)
    # The same for every input dtype: the rows that a call reads may be narrower than these.
    exact = own_eps(dtype(f["input"])) if eps is None else number(eps)
    if exact is None:
        return None
    # The kernels read gamma and beta of one dtype: the casts of both are left out.
    norm = Norm(f.kind, f["input"], exact, node, node, {node}, beta=above(f["bias"]))
    norm.is_rounded = is_narrowed(f["weight"]) or is_narrowed(f["bias"])
    if f["weight"] is not None:
        norm.gamma, norm.offset = _gamma(f["weight"], features[0]) or (f["weight"], 0.0)
    return norm


def _grouped(node: Node) -> Norm | None:
    """Return the LayerNorm that equals a GroupNorm of one group on a matrix `[M, K]`."""
    f = form(node)
    x, eps = f["input"], number(f.args.get("eps", 1e-5))
    if not is_tensor(x) or value(x).dim() != 2 or f["num_groups"] != 1 or eps is None:
        return None
    norm = Norm(LAYER_NORM, x, eps, node, node, {node}, gamma=f["weight"], beta=f["bias"])
    norm.is_rounded = is_narrowed(f["weight"])
    return norm


def _written_out(product: Node) -> Norm | None:
    """Return the norm that is a product of rows and a reciprocal root, or a quotient by a root."""
    for root in (form(product)["other"], form(product)["input"]):
        found = find_root(root, product)
        if found is None:
            continue
        rows, gamma = other(product, root), None
        inner = {product, *found.inner}
        x = found.x
        early = form(rows)
        if early.kind == "mul" and only_user(rows) is product and not written(rows):
            # gamma * (x - mean) / root
            for each in (early["input"], early["other"]):
                if is_vector(each, shape(product)[-1]):
                    inner.add(rows)
                    gamma, rows = each, other(rows, each)
                    break
        if found.is_centered:
            centered = find_centered(rows)
            if centered is None or above(centered[0]) is not above(x):
                return None
            inner |= centered[1]
        elif above(rows) is not above(x):
            return None
        # The rows that are multiplied: a model may square a wider copy of them.
        x = rows if is_tensor(rows) and not found.is_centered else x
        name = LAYER_NORM if found.is_centered else RMS_NORM
        norm = Norm(name, x, found.eps, product, product, inner)
        norm.factor, norm.unlike = found.factor, found.unlike
        if gamma is not None:
            norm.gamma, norm.offset = _gamma(gamma, shape(product)[-1]) or (gamma, 0.0)
            norm.is_rounded |= dtype(product).itemsize < 4
        norm.is_rounded |= any(map(is_narrowed, (found.x, rows, x)))
        norm.is_rounded |= norm.factor != 1.0 and dtype(product).itemsize < 4
        return norm
    return None


def _normalized(node: Node) -> Norm | None:
    """Return the RMSNorm that equals `F.normalize`: x / ||x|| = x / (sqrt(K) rms(x)).

    It divides by the maximum of the length and eps, while the norm adds eps to a mean square: they
    differ for rows about as short as eps.
    """
    f = form(node)
    x, least = f["input"], number(f.args.get("eps", 1e-12))
    if not is_tensor(x) or least is None or not is_number(f.args.get("p", 2.0), 2.0):
        return None
    if f.args.get("dim", 1) not in (-1, value(x).dim() - 1) or f["out"] is not None:
        return None
    features = shape(x)[-1]
    if not isinstance(features, int):
        return None
    norm = Norm(RMS_NORM, x, least * least / features, node, node, {node})
    norm.factor, norm.unlike = features**-0.5, bounded(least)
    norm.is_rounded = dtype(node).itemsize < 4
    return norm


def _gamma(node: Any, features: Any) -> tuple[Node, float] | None:
    """Return the vector and the offset of w or 1 + w; None if it is not a vector."""
    if not is_vector(node, features) and not is_single(node):
        return None
    vector = above(node)
    if is_plain_sum(vector):
        weight, one = pair(vector)
        if is_number(one, 1.0):
            return above(weight), 1.0
    return vector, 0.0


def _take_in_affine(norm: Norm) -> None:
    """Include the casts, gamma and beta that follow."""
    features = shape(norm.out)[-1]
    widest, is_narrow = dtype(norm.out).itemsize, False
    while (user := only_user(norm.out)) is not None and not written(user):
        f = form(user)
        if is_noop(user) or is_cast(user):
            # The result is widened after rounding, so that the rounding is visible.
            norm.is_rounded |= is_narrow and not is_noop(user)
            is_narrow |= is_narrowing(user)
            norm.out = user
            norm.inner.add(user)
            continue
        operand = other(user, norm.out) if f.kind in ("mul", "add", "div") else None
        if norm.beta is None and _take_in_number(norm, user, operand):
            continue
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


def _take_in_number(norm: Norm, user: Node, operand: Any) -> bool:
    """Include a product with a number, if a node is one; return whether it is."""
    f, by = form(user), number(operand)
    is_one = f.kind == "mul" or (f.kind == "div" and f["input"] is norm.out)
    is_plain = is_one and not f["rounding_mode"] and dtype(user) is dtype(norm.out)
    if by is None or not by or not is_plain:
        return False
    norm.factor = norm.factor * by if f.kind == "mul" else norm.factor / by
    norm.is_rounded |= dtype(user).itemsize < 4
    norm.out = user
    norm.inner.add(user)
    return True


def _take_in_casts(norm: Norm) -> None:
    """Let x be the input of widening casts before a norm, if it has the dtype of the result."""
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
