"""Heads: a Linear layer whose logits are only read by a cross entropy, fused into one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from fused_norm.chain import head_sm90
from fused_norm.cross_entropy import Loss
from fused_norm.head import linear_cross_entropy
from fused_norm.models.calls import Left
from fused_norm.models.costs import count
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow, reads
from fused_norm.models.forms import form, is_cast, is_narrowing, is_noop, name
from fused_norm.models.norms import module_path
from fused_norm.models.readers import Product, find_product
from fused_norm.models.sites import HEAD, Site
from fused_norm.models.values import are_same, is_number, is_plain, is_tensor, number, shape, value
from fused_norm.models.writes import written
from fused_norm.ops.operands import hint

# Below this many bytes of logits a call does not pay: PyTorch's compiler fuses what follows.
_LEAST_BYTES = 1 << 25


@dataclass
class _Head:
    """A Linear layer and the cross entropy of its logits.

    Attributes:
        loss: The cross entropy.
        product: The layer.
        x: Its input.
        views: Views on the way that keep its rows whole, starting at the layer.
        softcap: The bound that tanh applies to logits, or None.
        inner: All nodes of the head.
    """

    loss: Node
    product: Product
    x: Node
    views: list[Node] = field(default_factory=list)
    softcap: float | None = None
    inner: set[Node] = field(default_factory=set)


def fuse_heads(emitter: Emitter, small: bool | None) -> list[Site]:
    """Emit a call for each head; return the sites of the cross entropies of Linear layers.

    Args:
        emitter: Adds nodes to the graph.
        small: Whether to fuse even heads of few logits.
    """
    sites = []
    for loss in [node for node in emitter.graph.nodes if form(node).kind == "cross_entropy"]:
        emitter.made.clear()
        site = Site(module_path(loss), HEAD)
        try:
            head = _find(loss, site)
            _check(head, emitter.flow, small)
            _put(head, emitter, site)
        except Left as left:
            emitter.forget()
            site.reason = str(left)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            emitter.forget()
            site.reason = f"no such call: {error}"
        if site.shape:
            sites.append(site)
    return sites


def _find(loss: Node, site: Site) -> _Head:
    """Return the head that ends in a cross entropy.

    Raises:
        Left: If there is none, or a call could not compute the same.
    """
    node: Any = form(loss)["input"]
    if is_tensor(node):
        site.describe(value(node))
    views: list[Node] = []
    inner = {loss}
    softcap = None
    while True:
        if not isinstance(node, Node) or not is_tensor(node):
            raise Left("its input is no tensor of this graph")
        if softcap is None and (cap := _softcap(node)):
            softcap, between, node = cap
            inner |= between
            continue
        f = form(node)
        if f.kind in ("linear", "addmm", "matmul"):
            break
        if is_noop(node) or (is_cast(node) and not is_narrowing(node)):
            pass
        elif _is_view(node):
            views.insert(0, node)
        else:
            raise Left(f"its input comes from {name(node)}")
        inner.add(node)
        node = f["input"]
    start = form(node)["mat1"] if form(node).kind == "addmm" else form(node)["input"]
    product = find_product(node, start) if isinstance(start, Node) else None
    if product is None or product.out is not node:
        raise Left("its input comes from a product that is no Linear layer's")
    site.path = module_path(product.node) or site.path
    site.describe(value(start)).linears = 1
    for each in sorted({product.node, *inner} - {loss}):
        outside = [user for user in each.users if user not in inner]
        if outside:
            raise Left(f"logits are read by {name(outside[0])} as well")
        if written(each):
            raise Left("logits are written in place")
    inner.add(product.node)
    return _Head(loss, product, start, views, softcap, inner)


def _softcap(node: Node) -> tuple[float, set[Node], Any] | None:
    """Return the bound of a softcap, its nodes and its input: c tanh(z / c)."""
    f = form(node)
    if f.kind != "mul":
        return None
    bent, cap = f["input"], number(f["other"])
    if cap is None:
        bent, cap = f["other"], number(f["input"])
    if cap is None or form(bent).kind != "tanh" or written(node):
        return None
    divided = form(bent)["input"]
    d = form(divided)
    if d.kind == "div" and is_number(d["other"], cap) and not written(divided):
        return cap, {node, bent, divided}, d["input"]
    return None


def _is_view(node: Node) -> bool:
    """Return whether a node keeps rows of logits whole, and can be applied to the rows of x."""
    f = form(node)
    if f.kind not in ("view", "getitem", "slice", "contiguous"):
        return False
    before, after = shape(f["input"]), shape(node)
    if len(after) < 1 or not are_same(before[-1], after[-1]):
        return False
    if f.kind == "view":
        return len(after) == 2 or bool(node.target in ("flatten", torch.flatten))
    if f.kind == "slice":
        return bool(f.args.get("dim", 0) % len(before) != len(before) - 1)
    index = f["index"] if isinstance(f["index"], tuple) else (f["index"],)
    is_whole = Ellipsis in index or len(index) == len(before)
    if not all(i is Ellipsis or isinstance(i, slice) for i in index):
        return False
    return bool(index[-1] == slice(None) if is_whole else len(index) < len(before))


def _check(head: _Head, flow: Flow, small: bool | None) -> None:
    """Raise the first reason against fusing a head.

    Raises:
        Left: If there is one.
    """
    loss, f = head.loss, form(head.loss)
    target, product = f["target"], head.product
    if f["size_average"] is not None or f["reduce"] is not None:
        raise Left("size_average and reduce are not served")
    if not is_tensor(target) or value(target).dtype is not torch.int64:
        raise Left("its target has no labels but probabilities")
    if len(shape(f["input"])) != 2:
        raise Left("its logits have more than two dimensions, classes the second")
    operands = [
        v
        for v in (head.x, product.weight, product.bias, target, f["weight"])
        if isinstance(v, Node)
    ]
    if not all(is_plain(value(v)) for v in operands):
        raise Left("a tensor subclass has ops of its own")
    if not flow.are_under_same_modes([product.node, loss]):
        raise Left("logits and loss are computed under different modes")
    read = reads(head.inner, operands)
    if not flow.are_recorded_alike(read):
        raise Left("a part of it is computed without recording gradients")
    if flow.is_written(operands, min(read), loss):
        raise Left("an operand is written between")
    size = count(value(product.node)) * value(product.node).dtype.itemsize
    if size < _LEAST_BYTES and not small:
        raise Left("PyTorch's ops are faster for a call this small")


def _implementation(head: _Head) -> str:
    """Return in words which code computes a head."""
    f, bias = form(head.loss), head.product.bias
    logits = value(head.product.node)
    loss = Loss(label_smoothing=f["label_smoothing"] or 0.0, softcap=head.softcap or 0.0)
    biases = None if bias is None else hint(shape(bias)[0])
    features = hint(shape(head.x)[-1])
    has_kernels = head_sm90.are_for(logits.device, logits.dtype, features, biases, loss)
    return "kernels" if has_kernels else "PyTorch's ops on chunks of rows"


def _put(head: _Head, emitter: Emitter, site: Site) -> None:
    """Emit the call into the graph, and remove the nodes that it replaces."""
    loss, product = head.loss, head.product
    f = form(loss)
    emit = partial(emitter.emit, loss)
    with emitter.graph.inserting_before(loss):
        rows = head.x
        for view in head.views:
            v = form(view)
            if v.kind == "view" and view.target not in ("flatten", torch.flatten):
                rows = emit(torch.reshape, rows, (-1, shape(rows)[-1]))
            elif v.kind != "contiguous":
                rows = emit(view.target, rows, *view.args[1:], **view.kwargs)
        weight = emit(torch.t, product.weight) if product.is_transposed else product.weight
        options = {"ignore_index": f["ignore_index"], "label_smoothing": f["label_smoothing"]}
        options |= {"reduction": f["reduction"], "class_weight": f["weight"]}
        options |= {"softcap": head.softcap}
        given = {key: each for key, each in options.items() if each is not None}
        result = emit(linear_cross_entropy, rows, weight, f["target"], product.bias, **given)
        if value(result).dtype is not value(loss).dtype:
            result = emit("to", result, value(loss).dtype)
    if value(result).shape != value(loss).shape:
        raise Left("the loss has another shape")
    site.calls, site.implementation = ["linear_cross_entropy"], _implementation(head)
    emitter.replace(loss, result, head.inner, [result], site)
