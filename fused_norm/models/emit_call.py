"""Adds a call of the op family to a graph, with the nodes that bring its operands into shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fused_norm.functional import norm_linear, norm_mlp
from fused_norm.models.calls import FusedCall, Left
from fused_norm.models.emit import Emitter
from fused_norm.models.forms import form
from fused_norm.models.layouts import fitted
from fused_norm.models.norms import Norm
from fused_norm.models.readers import Product
from fused_norm.models.values import dtype, is_single, shape, value
from fused_norm.models.views import inverse
from fused_norm.norms import LAYER_NORM
from fused_norm.ops.autocast import cast, dtype_of_products
from fused_norm.ops.output_parts import norm_linear_in_parts


def emit_call(emitter: Emitter, norm: Norm, call: FusedCall, x: Node) -> list[tuple[Node, Node]]:
    """Emit a call at a graph's insertion point; return what it replaces, each with its result.

    Args:
        emitter: Adds nodes to the graph.
        norm: The norm.
        call: The call.
        x: The input of the norm.

    Raises:
        Left: If a result differs from what it replaces.
    """
    reading, activated = call.reading, call.activated
    emit = partial(emitter.emit, norm.anchor)

    def again(view: Node, on: Node) -> Node:
        # The rows of x may not allow a view that normalized rows do.
        target = "reshape" if view.target == "view" else view.target
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return emit(target, on, *view.args[1:], **view.kwargs)

    def upright(product: Product) -> Node:
        return emit(torch.t, product.weight) if product.is_transposed else product.weight

    residual = None
    if call.total is not None:
        x, residual = call.total[:2]
    options: dict[str, Any] = {"normalization": norm.kind, "eps": norm.eps}
    gamma, beta, offset = _affine(norm, x, emit)
    for view in reading.views:
        x = again(view, x)
    options |= {"norm_weight": gamma, "norm_bias": beta, "residual": residual}
    options |= {"weight_offset": offset, "activation": activated and activated.name}
    returns_sum = call.returns_sum or call.passes_on is not None
    options |= {"return_sum": returns_sum, "return_norm": call.norm is not None}
    # A mode decides nothing when the graph runs.
    options["recipe"] = call.recipe or ""
    for view in reading.views:
        if form(view).kind == "from_local":
            for name in ("norm_weight", "norm_bias"):
                options[name] = options[name] and again(view, options[name])
    if reading.modulation is not None:
        scale = reading.modulation.scale
        for view in reading.modulation.scale_views:
            scale = again(view, scale)
        options |= {"scale": scale, "shift": reading.modulation.shift}
    products = reading.products if activated is None else activated.products
    with emitter.flow.autocast(norm.anchor):
        to = dtype_of_products(value(x))
    _require_taken(norm.anchor, to)
    _require_one_dtype(value(x), call.products(), to)
    weight: Any = [upright(product) for product in products]
    bias: Any = [product.bias for product in products]
    if activated is not None and activated.is_swapped:
        half = shape(weight[0])[0] // 2
        parts = slice(half, None), slice(None, half)
        weight = [emit(operator.getitem, weight[0], part) for part in parts]
        bias = [b and emit(operator.getitem, b, part) for b in bias for part in parts]
    if len(weight) == 1:
        weight, bias = weight[0], bias[0]
    target: Callable[..., Any] = norm_linear
    arguments = [x, weight, bias]
    if activated is not None and activated.second is not None:
        second = activated.second
        target = norm_mlp
        arguments += [upright(second), second.bias]
        options["residual_out"] = activated.residual
    if call.parts is not None:
        target = norm_linear_in_parts
        arguments.append(call.parts.sizes)
    defaults = {"normalization": LAYER_NORM, "weight_offset": 0.0}
    kwargs = {
        name: each
        for name, each in options.items()
        if not (each is None or each is False or each == defaults.get(name))
    }
    result = emit(target, *arguments, **kwargs)
    old = call.results()
    extras = [call.total[2]] * call.returns_sum if call.total is not None else []
    extras += [node for node in (call.passes_on, call.norm) if node is not None]
    new, rest = [result], list[Node]()
    if extras or call.parts is not None:
        count = 1 if call.parts is None else len(call.parts.sizes)
        items = [emit(operator.getitem, result, i) for i in range(count + len(extras))]
        new, rest = items[:count], items[count:]
        result = items[0]
    if rest and call.norm is not None and call.norm is not reading.source:
        for view in reversed(reading.views):
            rest[-1] = emit(torch.permute, rest[-1], inverse(view))
    if call.parts is not None:
        new = call.parts.results(new, emit)
    elif len(old) > 1:
        new = [emit(operator.getitem, result, i) for i in range(len(old))]
    pairs = list(zip([*old, *extras], [*new, *rest], strict=True))
    if any(value(node).requires_grad for node, _ in pairs):
        # If one result of a call requires a gradient, all do; the model's may not.
        pairs = [
            (node, by if value(node).requires_grad else emit(torch.detach, by))
            for node, by in pairs
        ]
    return [(node, fitted(node, by, emit)) for node, by in pairs]


def _affine(norm: Norm, x: Node, emit: Callable[..., Node]) -> tuple[Any, Any, float]:
    """Return gamma, beta and offset, multiplied by the norm's factor.

    Args:
        norm: The norm.
        x: What the call reads: its result may replace the sum that the norm reads.
        emit: Adds a node.
    """
    gamma, beta = norm.gamma, norm.beta
    features = shape(norm.x)[-1]
    if is_single(gamma):
        gamma = emit(torch.broadcast_to, gamma, (features,))
    if is_single(beta):
        beta = emit(torch.broadcast_to, beta, (features,))
    gamma, beta = _of_one_dtype(gamma, beta, dtype(norm.x), emit)
    # With the model's constants, sqrt(K) / sqrt(K) is one except for the last bits.
    if abs(norm.factor - 1.0) < 1e-12:
        return gamma, beta, norm.offset
    if gamma is None:
        wide = torch.promote_types(dtype(norm.x), torch.float32)
        gamma = emit(torch.Tensor.new_full, x, (features,), norm.factor, dtype=wide)
    else:
        # Rounded once, like the norm.
        if value(gamma).itemsize < 4:
            gamma = emit(torch.Tensor.float, gamma)
        gamma = emit(torch.mul, gamma, norm.factor)
    if beta is not None and value(beta).itemsize < value(gamma).itemsize:
        beta = emit(torch.Tensor.float, beta)
    return gamma, beta, norm.offset * norm.factor


def _of_one_dtype(
    gamma: Any, beta: Any, rows: torch.dtype, emit: Callable[..., Node]
) -> tuple[Any, Any]:
    """Return gamma and beta in the dtype of the rows, or both in float32 for narrower rows.

    Neither PyTorch's norms nor the kernels take other dtypes. What this rounds, the model rounds
    as well: it computes nothing wider than float32, or than the rows.
    """
    given = {dtype(v) for v in (gamma, beta) if v is not None}
    wanted = rows if given <= {rows} else torch.promote_types(rows, torch.float32)
    gamma, beta = (
        v if v is None or dtype(v) is wanted else emit("to", v, wanted) for v in (gamma, beta)
    )
    return gamma, beta


def _require_taken(norm: Node, to: torch.dtype | None) -> None:
    """Refuse gamma and beta that PyTorch's op does not take: the model's error stays.

    Args:
        norm: The node of a norm.
        to: The dtype to which autocast casts rows of products, None without autocast.

    Raises:
        Left: If the op would raise an error.
    """
    f = form(norm)
    # On GPUs, autocast casts all of them to float32.
    if f.kind not in ("layer_norm", "group_norm") or (to and value(f["input"]).is_cuda):
        return
    rows = dtype(f["input"])
    given = {dtype(v) for v in (f["weight"], f["bias"]) if v is not None} or {rows}
    if given not in ({rows}, {torch.promote_types(rows, torch.float32)}):
        words = ", ".join(sorted(map(str, given)))
        raise Left(f"its rows are {rows}, and PyTorch's norm takes no parameters of {words}")


def _require_one_dtype(x: Tensor, products: Sequence[Product], to: torch.dtype | None) -> None:
    """Refuse rows and layers of different dtypes, which only fake tensors multiply.

    Args:
        x: The input of the norm.
        products: The layers of a call.
        to: The dtype to which autocast casts them and their rows, None without autocast.

    Raises:
        Left: If PyTorch's ops or the kernels would raise an error.
    """
    given = [
        value(v) for p in products if p.recipe is None for v in (p.weight, p.bias) if v is not None
    ]
    rows, *others = (x, *given) if to is None else cast(to, x, *given)
    for other in others:
        if other.dtype is not rows.dtype:
            raise Left(f"its rows are {x.dtype}, and a layer's parameters {other.dtype}")
