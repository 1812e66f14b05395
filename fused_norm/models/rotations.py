"""Rotary embeddings of queries and keys, written out: each as one call, with the norm of its heads.

x cos + turned(x) sin        turned(x) is cat(-x2, x1) of halves, or stack(-x2, x1) of neighbors
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fused_norm.chain.rotary import has_kernel
from fused_norm.models.costs import bytes_written, count, count_ops
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow
from fused_norm.models.forms import form, is_cast, is_noop, is_plain_sum, only_user
from fused_norm.models.norms import Norm, candidates, find_norm, module_path
from fused_norm.models.sites import ROTARY, Site
from fused_norm.models.values import (
    are_same,
    dtype,
    have_same_strides,
    is_plain,
    is_tensor,
    shape,
    value,
)
from fused_norm.models.writes import written
from fused_norm.norms import RMS_NORM
from fused_norm.ops.operands import hint
from fused_norm.ops.rotary import rotate_heads

# With fewer elements, what PyTorch's compiler makes of them is done before a call of ours starts.
_LEAST_ELEMENTS = 1 << 17


class _Left(Exception):
    """A rotation stays as it is; says why."""


@dataclass
class _Rotation:
    """A rotation of heads.

    Attributes:
        root: The result.
        x: What is rotated, of the shape of the root, or its first elements.
        cos: Cosines, to broadcast against x.
        sin: Sines, likewise.
        is_interleaved: Whether neighbors are rotated into each other.
        inner: All nodes that are the rotation.
        base: The heads before their norm.
        is_transposed: Whether heads and rows change places between base and root.
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


def fuse_rotations(
    graph: Graph, flow: Flow, emitter: Emitter, small: bool | None, keeps_rounding: bool
) -> list[Site]:
    """Put a call in the place of each rotation; return what became of them.

    Args:
        graph: The graph.
        flow: What is known of it.
        emitter: Puts nodes into it.
        small: Whether to fuse rotations of few elements, too.
        keeps_rounding: Whether rounding that a model does in between is kept.
    """
    rotations = [_find(node) for node in graph.nodes if is_plain_sum(node)]
    found = [rotation for rotation in rotations if rotation is not None]
    if not found:
        return []
    norms = {n.out: n for n in map(find_norm, candidates(graph)) if n is not None}
    sites = []
    for rotation in found:
        emitter.made.clear()
        x = value(rotation.x)
        name = str(x.dtype).removeprefix("torch.")
        site = Site(module_path(rotation.root), ROTARY, tuple(map(str, x.shape)), name)
        try:
            _climb(rotation, norms)
            _check(rotation, flow, small, keeps_rounding)
            _put(rotation, graph, emitter, site)
        except _Left as left:
            emitter.forget()
            site.reason = str(left)
        sites.append(site)
    return sites


def _find(total: Node) -> _Rotation | None:
    """Return the rotation that a sum ends, None for any other sum."""
    f = form(total)
    if not is_tensor(total) or value(total).dim() != 4:
        return None
    for one, two in ((f["input"], f["other"]), (f["other"], f["input"])):
        if not _is_product(one) or not _is_product(two):
            continue
        for turned, sin in _orders(two):
            found = _turned(turned)
            for x, cos in _orders(one) if found is not None else ():
                if found is not None and x is found[0] and is_tensor(cos) and is_tensor(sin):
                    inner = {total, one, two, *found[2]}
                    return _Rotation(total, x, cos, sin, found[1], inner)
    return None


def _is_product(node: Any) -> bool:
    return form(node).kind == "mul" and is_tensor(node) and not written(node)


def _orders(product: Node) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    a, b = form(product)["input"], form(product)["other"]
    return (a, b), (b, a)


def _turned(node: Any) -> tuple[Node, bool, set[Node]] | None:
    """Return what is turned by 90 degrees, whether by neighbors, and the nodes that do so."""
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
    """Return of which tensor a node is which elements of the last dimension, and its nodes."""
    f = form(node)
    x = f["input"]
    if not isinstance(x, Node) or written(node):
        return None
    if f.kind == "getitem" and form(x).kind in ("chunk", "split"):
        return _chunk(node)
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
    """Return the same of a half that `chunk` or `split` made."""
    f = form(node)
    parts = f["input"]
    x = form(parts)["input"]
    if form(parts).args.get("dim", 0) not in (-1, value(x).dim() - 1):
        return None
    size, own = shape(x)[-1], shape(node)[-1]
    if not isinstance(size, int) or size != 2 * own or f["index"] not in (0, 1):
        return None
    return x, range(f["index"] * own, (f["index"] + 1) * own), {node, parts}


def _climb(r: _Rotation, norms: dict[Node, Norm]) -> None:
    """Go from what is rotated up to the heads before their norm, and down to the result."""
    _take_in_rest(r)
    cast = only_user(r.root)
    kept = dtype(r.root if cast is None or not is_cast(cast) else cast)
    node: Any = r.x
    # What others read as well is the base: it is computed in any case.
    while node.users.keys() <= r.inner and not written(node):
        f = form(node)
        norm = norms.get(node)
        if norm is not None and r.norm is None and _is_of_heads(norm):
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


def _take_in_rest(r: _Rotation) -> None:
    """Take in the elements that are not rotated, where the rotation is of the first ones alone."""
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


def _is_of_heads(norm: Norm) -> bool:
    has_plain_gamma = norm.gamma is None or value(norm.gamma).dim() == 1
    is_plain_rms = norm.kind == RMS_NORM and norm.beta is None and norm.factor == 1.0
    return is_plain_rms and not norm.unlike and has_plain_gamma and value(norm.x).dim() == 4


def _swaps(one: Any, two: Any) -> bool:
    return {one % 4, two % 4} == {1, 2}


def _check(r: _Rotation, flow: Flow, small: bool | None, keeps_rounding: bool) -> None:
    """Raise what speaks against a rotation.

    Raises:
        _Left: If something does.
    """
    base, gamma = r.base, None if r.norm is None else r.norm.gamma
    operands = [v for v in (base, r.cos, r.sin, gamma) if v is not None]
    if not isinstance(base, Node) or not all(is_plain(value(v)) for v in operands):
        raise _Left("a tensor subclass has ops of its own")
    size, rotated = shape(base)[-1], shape(r.cos)[-1]
    x = value(base)
    if not has_kernel(x.device, x.dtype, size, rotated):
        raise _Left(
            f"no kernel rotates {rotated} of {size} elements in {x.dtype} on {x.device.type}"
        )
    if any(value(v).dtype not in (x.dtype, torch.float32) for v in operands):
        raise _Left("dtypes of the operands differ")
    if keeps_rounding and x.dtype.itemsize < 4:
        raise _Left("the model rounds in between")
    if hint(count(x)) < _LEAST_ELEMENTS and not small:
        raise _Left("PyTorch's ops finish a call this small sooner")
    _check_angles(r)
    if any(value(v).requires_grad for v in (r.cos, r.sin)):
        raise _Left("gradients of cosines are wanted")
    if any(not node.users.keys() <= r.inner for node in r.inner - {r.root}):
        raise _Left("a part of it is read by others as well")
    if not flow.are_under_same_modes(r.inner):
        raise _Left("autocast or the recording of gradients changes between norm and rotation")
    trains = value(r.root).requires_grad
    if flow.is_written(operands, min(r.inner), None if trains else r.root):
        raise _Left("an operand is written")


def _check_angles(r: _Rotation) -> None:
    """Raise unless cosines and sines are those of each row.

    Raises:
        _Left: If they are not, as where each head has its own.
    """
    for angles in (r.cos, r.sin):
        own, x = tuple(shape(angles)), tuple(shape(r.root))
        own = (1,) * (4 - len(own)) + own
        place = 2 if _has_heads_first(r) else 1
        if not are_same(own[place], x[place]) or not are_same(own[3 - place], 1):
            raise _Left("cosines are not those of rows")
        if not (are_same(own[0], 1) or are_same(own[0], x[0])):
            raise _Left("cosines are not those of rows")


def _has_heads_first(r: _Rotation) -> bool:
    """Return whether the root is of shape [batch, heads, rows, elements], by its cosines."""
    own = tuple(shape(r.cos))
    return r.is_transposed or len(own) < 3 or not are_same(own[-2], 1)


def _put(r: _Rotation, graph: Graph, emitter: Emitter, site: Site) -> None:
    """Put the call into the graph, and take out what it stands for.

    Raises:
        _Left: If its result would lie in memory in another way.
    """
    norm, root = r.norm, r.root

    def put(target: Any, *args: Any) -> Node:
        return emitter.put(target, args, {}, root)

    with graph.inserting_before(root):
        cos, sin = (put(torch.reshape, v, (-1, shape(v)[-1])) for v in (r.cos, r.sin))
        turns = _has_heads_first(r)
        x = put(torch.transpose, r.base, 1, 2) if turns and not r.is_transposed else r.base
        gamma, eps, offset = (
            (None, 0.0, 0.0) if norm is None else (norm.gamma, norm.eps, norm.offset)
        )
        options = (norm is not None, float(eps), float(offset), r.is_interleaved)
        y = put(rotate_heads, x, gamma, cos, sin, *options)
        if turns:
            y = put(torch.transpose, y, 1, 2)
        if not have_same_strides(value(y), value(root)):
            y = put("contiguous", y)
    one, two = value(y), value(root)
    if one.dtype is not two.dtype or not are_same(one.shape, two.shape):
        raise _Left("a result of another kind")
    if not have_same_strides(one, two):
        raise _Left("a result that lies in memory in another way")
    one.requires_grad_(two.requires_grad)
    root.replace_all_uses_with(y)
    gone = sorted(r.inner, reverse=True)
    made = [node for node in emitter.made if node is not y]
    site.fused, site.way = True, "kernels"
    site.calls = ["rotary" if norm is None else "rotary: rms_norm"]
    site.ops_before, site.ops_after = count_ops(gone), 1
    site.bytes_saved = bytes_written(gone) - bytes_written([y, *made])
    for node in gone:
        if not node.users:
            graph.erase_node(node)
