"""Replaces each rotary embedding, with the norm of its heads, by a call."""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Node

from fused_norm.chain.rotary import has_kernel
from fused_norm.models.calls import Left
from fused_norm.models.costs import count
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow, reads
from fused_norm.models.forms import is_plain_sum
from fused_norm.models.norms import module_path
from fused_norm.models.rotary_forms import Rotary, climb, find_rotary
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
from fused_norm.ops.rotary import rotate_heads

# Below this many elements, code from PyTorch's compiler finishes before a call of ours starts.
_LEAST_ELEMENTS = 1 << 17


def fuse_rotations(emitter: Emitter, small: bool | None, keeps_rounding: bool) -> list[Site]:
    """Emit a call for each rotation; return their sites.

    Args:
        emitter: Adds nodes to the graph.
        small: Whether to fuse even rotations of few elements.
        keeps_rounding: Whether the model's intermediate rounding is kept.
    """
    sites = []
    for node in list(emitter.graph.nodes):
        # A rotation's input may be another's result: it is found once that is a call.
        rotation = find_rotary(node) if not node._erased and is_plain_sum(node) else None
        if rotation is None:
            continue
        emitter.made.clear()
        site = Site(module_path(rotation.root), ROTARY).describe(value(rotation.x))
        try:
            climb(rotation)
            _check(rotation, emitter.flow, small, keeps_rounding)
            _put(rotation, emitter, site)
        except Left as left:
            emitter.forget()
            site.reason = str(left)
        sites.append(site)
    return sites


def _check(r: Rotary, flow: Flow, small: bool | None, keeps_rounding: bool) -> None:
    """Raise the first reason against fusing a rotation.

    Raises:
        Left: If there is one.
    """
    base, gamma = r.base, None if r.norm is None else r.norm.gamma
    operands = [v for v in (base, r.cos, r.sin, gamma) if v is not None]
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
    if count(x) < _LEAST_ELEMENTS and not small:
        raise Left("PyTorch's ops are faster for a call this small")
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
    x, place = tuple(shape(r.root)), 2 if _has_heads_first(r) else 1
    if not are_same(own[place], x[place]) or not are_same(own[3 - place], 1):
        raise Left("cosines are not those of rows")
    if not (are_same(own[0], 1) or are_same(own[0], x[0])):
        raise Left("cosines are not those of rows")


def _has_heads_first(r: Rotary) -> bool:
    """Return whether the root has shape [batch, heads, rows, elements], judging by its cosines."""
    own = tuple(shape(r.cos))
    return r.is_transposed or len(own) < 3 or not are_same(own[-2], 1)


def _put(r: Rotary, emitter: Emitter, site: Site) -> None:
    """Emit the call into the graph, and remove the nodes that it replaces.

    Raises:
        Left: If its result would have another memory layout.
    """
    norm, root = r.norm, r.root
    emit = partial(emitter.emit, root)
    with emitter.graph.inserting_before(root):
        cos, sin = (emit(torch.reshape, v, (-1, shape(v)[-1])) for v in (r.cos, r.sin))
        turns = _has_heads_first(r)
        x = emit(torch.transpose, r.base, 1, 2) if turns and not r.is_transposed else r.base
        gamma, eps, offset = (
            (None, 0.0, 0.0) if norm is None else (norm.gamma, norm.eps, norm.offset)
        )
        options = (norm is not None, float(eps), float(offset), r.is_interleaved)
        y = emit(rotate_heads, x, gamma, cos, sin, *options)
        if turns:
            y = emit(torch.transpose, y, 1, 2)
        if not have_same_strides(value(y), value(root)):
            y = emit("contiguous", y)
    one, two = value(y), value(root)
    if one.dtype is not two.dtype or not are_same(one.shape, two.shape):
        raise Left("a result of another kind")
    if not have_same_strides(one, two):
        raise Left("a result with another memory layout")
    one.requires_grad_(two.requires_grad)
    site.calls, site.implementation = ["rotary" if norm is None else "rotary: rms_norm"], "kernels"
    emitter.replace(root, y, r.inner, emitter.made, site)
