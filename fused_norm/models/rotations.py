"""Replaces each rotary embedding, with the norm of its heads, by a call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import Node

from fused_norm.chain.rotary import has_kernel
from fused_norm.models.cache_writes import write_caches
from fused_norm.models.calls import Left
from fused_norm.models.costs import count
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow, reads
from fused_norm.models.forms import is_plain_sum
from fused_norm.models.norms import module_path
from fused_norm.models.rotary_forms import Rotary, climb, find_rotary
from fused_norm.models.rotary_pairs import place_of_both
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
from fused_norm.ops.rotary import rotate_both, rotate_heads

# Below this many elements, code from PyTorch's compiler finishes before a call of ours starts.
_LEAST_ELEMENTS = 1 << 17


@dataclass
class _Found:
    """A rotation that a kernel computes, its site, and the call that computes it."""

    r: Rotary
    site: Site
    call: Node | None = None


def fuse_rotations(emitter: Emitter, small: bool | None, keeps_rounding: bool) -> list[Site]:
    """Emit a call for each rotation, or for two by the same angles; return their sites.

    Args:
        emitter: Adds nodes to the graph.
        small: Whether to fuse even rotations of few elements.
        keeps_rounding: Whether the model's intermediate rounding is kept.
    """
    sites: list[Site] = []
    # Rotations whose angles another one may share.
    waiting: list[_Found] = []
    every: list[_Found] = []
    for node in list(emitter.graph.nodes):
        r = _rotary_at(node)
        if r is None:
            continue
        inputs = [each for each in waiting if each.r.root in {*r.operands(), *r.inner}]
        if inputs:
            # It is found once its input is a call.
            for each in inputs:
                waiting.remove(each)
                _fuse([each], each.r.root, emitter, small)
            r = _rotary_at(node)
        if r is None:
            continue
        found = _Found(r, Site(module_path(r.root), ROTARY).describe(value(r.x)))
        sites.append(found.site)
        try:
            _check(r, emitter.flow, keeps_rounding)
        except Left as left:
            found.site.reason = str(left)
            continue
        every.append(found)
        for each in waiting:
            place = place_of_both(each.r, r, emitter.flow)
            if place is not None and _fuse([each, found], place, emitter, small):
                waiting.remove(each)
                break
        else:
            waiting.append(found)
    for each in waiting:
        _fuse([each], each.r.root, emitter, small)
    _write_caches(Emitter(emitter.graph), every)
    return sites


def _write_caches(emitter: Emitter, found: list[_Found]) -> None:
    """Let calls that rotate queries and keys write the keys to a cache, with the values."""
    for both in dict.fromkeys(one.call for one in found):
        if both is None or both.target is not rotate_both:
            continue
        if saved := write_caches(both, emitter):
            sites = [one.site for one in found if one.call is both]
            for site in sites:
                site.calls = [f"{site.calls[0]}, into caches"]
                # Of two writes one each.
                site.ops_before += 1
            sites[-1].bytes_saved += saved


def _rotary_at(node: Node) -> Rotary | None:
    """Return the rotation that ends in a node, with its base."""
    r = find_rotary(node) if not node._erased and is_plain_sum(node) else None
    if r is not None:
        climb(r)
    return r


def _fuse(found: list[_Found], place: Node, emitter: Emitter, small: bool | None) -> bool:
    """Emit one call for rotations, unless a reason against that is noted; return whether it is."""
    emitter.made.clear()
    try:
        if not small and sum(count(value(each.r.base)) for each in found) < _LEAST_ELEMENTS:
            raise Left("PyTorch's ops are faster for a call this small")
        _put(found, place, emitter)
    except Left as left:
        emitter.forget()
        for each in found:
            each.site.reason = str(left)
        return False
    return True


def _check(r: Rotary, flow: Flow, keeps_rounding: bool) -> None:
    """Raise the first reason against fusing a rotation.

    Raises:
        Left: If there is one.
    """
    base, operands = r.base, r.operands()
    if not isinstance(base, Node) or not all(is_plain(value(v)) for v in operands):
        raise Left("a tensor subclass has ops of its own")
    size, rotated = shape(base)[-1], shape(r.cos)[-1]
    x = value(base)
    if not has_kernel(x.device, x.dtype, size, rotated):
        raise Left(
            f"no kernel rotates {rotated} of {size} elements in {x.dtype} on {x.device.type}"
        )
    if any(value(v).dtype not in (x.dtype, torch.float32) for v in operands):
        raise Left("dtypes of the operands differ")
    inner = [node for node in r.inner if is_tensor(node)]
    if keeps_rounding and any(dtype(node).itemsize < 4 for node in inner):
        raise Left("the model rounds in between")
    _check_angles(r)
    if any(value(v).requires_grad for v in (r.cos, r.sin)):
        raise Left("gradients of cosines are wanted")
    if any(not node.users.keys() <= r.inner for node in r.inner - {r.root}):
        raise Left("a part of it is read by others as well")
    read = reads(r.inner, (v for v in operands if isinstance(v, Node)))
    if not (flow.are_under_same_modes(r.inner) and flow.are_recorded_alike(read)):
        raise Left("autocast or the recording of gradients changes between norm and rotation")
    trains = value(r.root).requires_grad
    if flow.is_written(operands, min(r.inner), None if trains else r.root):
        raise Left("an operand is written")


def _check_angles(r: Rotary) -> None:
    """Raise unless cosines and sines belong to rows.

    Raises:
        Left: If they do not, for instance if each head has its own.
    """
    own, other = ((1,) * (4 - len(shape(v))) + tuple(shape(v)) for v in (r.cos, r.sin))
    if not are_same(own, other):
        raise Left("cosines and sines differ in shape")
    x, place = tuple(shape(r.root)), 2 if r.has_heads_first else 1
    if not are_same(own[place], x[place]) or not are_same(own[3 - place], 1):
        raise Left("cosines are not those of rows")
    if not (are_same(own[0], 1) or are_same(own[0], x[0])):
        raise Left("cosines are not those of rows")


def _put(found: list[_Found], place: Node, emitter: Emitter) -> None:
    """Emit the call into the graph, and remove the nodes that it replaces.

    Raises:
        Left: If a result would have another memory layout.
    """
    first = found[0].r
    emit = partial(emitter.emit, place)
    with emitter.graph.inserting_before(place):
        angles = [emit(torch.reshape, v, (-1, shape(v)[-1])) for v in (first.cos, first.sin)]
        tensors = [each for one in found for each in _heads(one.r, emit)]
        eps, offset = (0.0, 0.0) if first.norm is None else (first.norm.eps, first.norm.offset)
        options = (first.norm is not None, float(eps), float(offset), first.is_interleaved)
        if len(found) == 1:
            call = emit(rotate_heads, *tensors, *angles, *options)
            ys = [call]
        else:
            call = emit(rotate_both, *tensors, *angles, *options)
            ys = [emit(operator.getitem, call, i) for i in range(2)]
        results = [_as_root(one.r, y, emit) for one, y in zip(found, ys, strict=True)]
    name = ("rotary" if len(found) == 1 else "rotary of both") + (
        "" if first.norm is None else ": rms_norm"
    )
    for one, y in zip(found, results, strict=True):
        site, root = one.site, one.r.root
        one.call = call
        site.calls, site.implementation, site.reason = [name], "kernels", ""
        if len(found) == 1:
            emitter.replace(root, y, one.r.inner, emitter.made, site)
            continue
        emitter.replace(root, y, one.r.inner, [y], site)
        # One launch writes both results, and counts at the first.
        site.bytes_saved -= count(value(y)) * dtype(y).itemsize
        site.ops_after = int(one is found[0])


def _heads(r: Rotary, emit: Callable[..., Node]) -> tuple[Node, Node | None]:
    """Emit the heads of a rotation, after rows, and return them and the weight of their norm."""
    turns = r.has_heads_first and not r.is_transposed
    x = emit(torch.transpose, r.base, 1, 2) if turns else r.base
    return x, None if r.norm is None else r.norm.gamma


def _as_root(r: Rotary, y: Node, emit: Callable[..., Node]) -> Node:
    """Emit what turns a call's result into that of a rotation.

    Raises:
        Left: If it would have another memory layout.
    """
    if r.has_heads_first:
        y = emit(torch.transpose, y, 1, 2)
    if not have_same_strides(value(y), value(r.root)):
        y = emit("contiguous", y)
    one, two = value(y), value(r.root)
    if one.dtype is not two.dtype or not are_same(one.shape, two.shape):
        raise Left("a result of another kind")
    if not have_same_strides(one, two):
        raise Left("a result with another memory layout")
    return y
