"""Rotary embeddings as models write them out.

x cos + turned(x) sin        turned(x) is cat(-x2, x1) of halves, or stack(-x2, x1) of neighbors
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from fused_norm.models.forms import above, form, is_cast, is_noop, only_user
from fused_norm.models.norms import Norm, find_norm
from fused_norm.models.values import are_same, dtype, is_tensor, shape, value
from fused_norm.models.writes import written
from fused_norm.norms import RMS_NORM

# Nodes to check above a norm's result: gamma, its offset, and casts come after the norm itself.
_MOST_STEPS = 8


@dataclass
class Rotary:
    """A rotation of heads.

    Attributes:
        root: The result.
        x: The rotated tensor, of the shape of the root, or its first elements.
        cos: Cosines, which broadcast against x.
        sin: Sines, which broadcast against x.
        is_interleaved: Whether neighbors are rotated into each other.
        inner: All nodes of the rotation.
        base: The heads before their norm.
        is_transposed: Whether heads and rows are transposed between base and root.
        norm: The norm of each head, or None.
    """

    root: Node
    x: Node
    cos: Node
    sin: Node
    is_interleaved: bool
    inner: set[Node] = field(default_factory=set)
    base: Any = None
    is_transposed: bool = False
    norm: Norm | None = None

    @property
    def has_heads_first(self) -> bool:
        """Whether the root has shape [batch, heads, rows, elements], judging by its cosines."""
        own = tuple(shape(self.cos))
        return self.is_transposed or len(own) < 3 or not are_same(own[-2], 1)

    def operands(self) -> list[Any]:
        """Return what is read, once the base is set."""
        gamma = None if self.norm is None else self.norm.gamma
        return [v for v in (self.base, self.cos, self.sin, gamma) if v is not None]


def find_rotary(total: Node) -> Rotary | None:
    """Return the rotation that ends in a sum, None for other sums.

    Args:
        total: A sum of two nodes.
    """
    f = form(total)
    if not is_tensor(total) or value(total).dim() != 4:
        return None
    for one, two in ((f["input"], f["other"]), (f["other"], f["input"])):
        if not _is_product(one) or not _is_product(two):
            continue
        for turned, sin in _orders(two):
            found = _turned(above(turned))
            for x, cos in _orders(one) if found is not None else ():
                if found is None or not is_tensor(cos) or not is_tensor(sin):
                    continue
                inner = {total, one, two, *found[2], *_between(turned)}
                if x is found[0]:
                    return Rotary(total, x, cos, sin, found[1], inner)
                if above(x) is above(found[0]):
                    inner |= _between(x) | _between(found[0])
                    return Rotary(total, above(x), cos, sin, found[1], inner)
    return None


def _between(node: Any) -> set[Node]:
    """Return the nodes that `above` goes through."""
    found = set()
    while node is not above(node):
        found.add(node)
        node = form(node)["input"]
    return found


def _is_product(node: Any) -> bool:
    return form(node).kind == "mul" and is_tensor(node) and not written(node)


def _orders(product: Node) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    a, b = form(product)["input"], form(product)["other"]
    return (a, b), (b, a)


def _turned(node: Any) -> tuple[Node, bool, set[Node]] | None:
    """Return the tensor turned by 90 degrees, whether as neighbors, and the nodes of that."""
    f = form(node)
    inner = {node}
    is_interleaved = f.kind == "view" and form(f["input"]).kind == "stack"
    if is_interleaved:
        node = f["input"]
        f = form(node)
        inner.add(node)
    elif f.kind != "cat":
        return None
    parts = f["tensors"]
    if len(parts) != 2 or form(parts[0]).kind != "neg":
        return None
    last = value(node).dim() - 1
    if f.args.get("dim", 0) not in (-1, last):
        return None
    negated = form(parts[0])["input"]
    second, first = _part(negated), _part(parts[1])
    if first is None or second is None or first[0] is not second[0]:
        return None
    x = first[0]
    size = shape(x)[-1]
    if not isinstance(size, int) or size % 2 or not are_same(shape(x), shape(max(inner))):
        return None
    halves = (range(size // 2), range(size // 2, size))
    wanted = (range(0, size, 2), range(1, size, 2)) if is_interleaved else halves
    if (first[1], second[1]) != wanted:
        return None
    return x, is_interleaved, inner | {*parts, negated} | first[2] | second[2]


def _part(node: Any) -> tuple[Node, range, set[Node]] | None:
    """Return the tensor and the range of last-dimension elements that a node is, and its nodes."""
    f = form(node)
    x = f["input"]
    if not isinstance(x, Node) or written(node):
        return None
    if f.kind == "getitem" and form(x).kind in ("chunk", "split"):
        return _chunk(node)
    if f.kind == "getitem" and form(x).kind == "unbind":
        return _of_pairs(node)
    if not is_tensor(x) or not isinstance(shape(x)[-1], int):
        return None
    size: int = shape(x)[-1]
    last = value(x).dim() - 1
    if f.kind == "slice" and f.args.get("dim", 0) in (-1, last):
        index = slice(f["start"], f["end"], f["step"])
    elif f.kind == "getitem" and isinstance(f["index"], tuple):
        *before, index = f["index"]
        whole = before == [Ellipsis] or before == [slice(None)] * last
        if not whole or not isinstance(index, slice):
            return None
    else:
        return None
    if not all(each is None or isinstance(each, int) for each in (index.start, index.stop)):
        return None
    return x, range(*index.indices(size)), {node}


def _chunk(node: Node) -> tuple[Node, range, set[Node]] | None:
    """Return the same for a half from `chunk` or `split`."""
    f = form(node)
    parts = f["input"]
    x = form(parts)["input"]
    if form(parts).args.get("dim", 0) not in (-1, value(x).dim() - 1):
        return None
    size, own = shape(x)[-1], shape(node)[-1]
    if not isinstance(size, int) or size != 2 * own or f["index"] not in (0, 1):
        return None
    return x, range(f["index"] * own, (f["index"] + 1) * own), {node, parts}


def _of_pairs(node: Node) -> tuple[Node, range, set[Node]] | None:
    """Return the same for one of each pair of neighbors, from a view and `unbind`."""
    f = form(node)
    parts = f["input"]
    pairs = form(parts)["input"]
    x = form(pairs)["input"]
    if form(pairs).kind != "view" or not is_tensor(x) or f["index"] not in (0, 1):
        return None
    size = shape(x)[-1]
    if form(parts).args.get("dim", 0) not in (-1, value(pairs).dim() - 1):
        return None
    if not isinstance(size, int) or not are_same(shape(pairs), (*shape(x)[:-1], size // 2, 2)):
        return None
    return x, range(f["index"], size, 2), {node, parts, pairs}


def climb(r: Rotary) -> None:
    """Extend a rotation up to the heads before their norm, and down to the result.

    Args:
        r: A rotation, whose base is set here.
    """
    _take_in_rest(r)
    cast = only_user(r.root)
    kept = dtype(r.root if cast is None or not is_cast(cast) else cast)
    node: Any = r.x
    # If others also read a node, it is the base: it is computed in any case.
    while node.users.keys() <= r.inner and not written(node):
        f = form(node)
        norm = _norm_to(node) if r.norm is None else None
        if norm is not None and _is_of_heads(norm):
            if any(not each.users.keys() <= norm.inner | r.inner for each in norm.inner):
                break
            r.norm = norm
            r.inner |= norm.inner
            node = norm.x
        elif f.kind == "transpose" and not r.is_transposed and _swaps(f["dim0"], f["dim1"]):
            r.is_transposed = True
            r.inner.add(node)
            node = f["input"]
        elif is_noop(node) or (is_cast(node) and dtype(f["input"]) is kept):
            r.inner.add(node)
            node = f["input"]
        else:
            break
    r.base = node
    if cast is not None and dtype(r.root) is not dtype(node) is kept:
        r.inner.add(cast)
        r.root = cast


def _take_in_rest(r: Rotary) -> None:
    """Include the elements that are not rotated, if only the first ones are."""
    part = _part(r.x)
    user = only_user(r.root)
    f = form(user)
    if part is None or part[1].start != 0 or part[1].step != 1 or f.kind != "cat":
        return
    parts = f["tensors"]
    rest = _part(parts[1]) if len(parts) == 2 and parts[0] is r.root else None
    size = shape(part[0])[-1]
    if rest is None or rest[0] is not part[0] or rest[1] != range(part[1].stop, size):
        return
    if user is not None and f.args.get("dim", 0) in (-1, 3):
        r.root, r.x = user, part[0]
        r.inner |= {user, *part[2], *rest[2]}


def _norm_to(end: Node) -> Norm | None:
    """Return the norm with this result: the op, or what multiplies and casts after it."""
    ahead = [end]
    for _ in range(_MOST_STEPS):
        if not ahead:
            break
        node = ahead.pop(0)
        norm = find_norm(node)
        if norm is not None and norm.out is end:
            return norm
        ahead += node.all_input_nodes
    return None


def _is_of_heads(norm: Norm) -> bool:
    has_plain_gamma = norm.gamma is None or value(norm.gamma).dim() == 1
    is_plain_rms = norm.kind == RMS_NORM and norm.beta is None and norm.factor == 1.0
    return is_plain_rms and not norm.unlike and has_plain_gamma and value(norm.x).dim() == 4


def _swaps(one: Any, two: Any) -> bool:
    return {one % 4, two % 4} == {1, 2}
