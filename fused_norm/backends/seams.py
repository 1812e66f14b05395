"""The op family by kernels: a product of an extension's, or row passes around PyTorch's products.

This is native/seam_forward.h in Python, for the calls that C++ leaves to Python: compiled graphs,
`main_grad`, autocast, other layouts, on Hopper CUDA graphs; and for all calls where the node is
not built. Either asks the same plans which way is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_norm.backends import cpu, cpu_seam, linear, passes, several, sm90
from fused_norm.backends.products import linear_add
from fused_norm.call import frozen
from fused_norm.call import parameters as known_parameters
from fused_norm.call.memory import aligned, dense, empty_statistics
from fused_norm.call.record import MOST_PARTS
from fused_norm.call.results import Results
from fused_norm.composition import (
    NAMES,
    NORMALIZATIONS,
    Added,
    Operands,
    Seam,
    first,
    has_sum,
    is_gate,
)


def forward(kind: Seam, t: Operands, keeps: bool) -> Results:
    """Compute a call.

    Args:
        kind: What to compute.
        t: Valid tensors, as `as_kernels_need` returns them, none of them empty.
        keeps: Whether a backward follows.
    """
    results = _by_product(kind, t, keeps) or _around_products(kind, t, keeps)
    if t.out_weight is None:
        return results
    second = Added(results.outputs[0], t.out_weight, t.out_bias, t.out_residual)
    norm = norm_of(kind)[0]
    return results._replace(outputs=[linear_add(second, kind.batch_invariant, norm=norm)])


def has_product(kind: Seam, t: Operands) -> bool:
    """Return whether an extension's product takes tensors of such types as they lie.

    It would copy a weight that lies otherwise, such as a Conv1D's. On Hopper, its plans choose a
    way by the number of rows.
    """
    if kind.batch_invariant and not t.x.is_cpu:
        return False
    return (
        t.x.dtype is t.weights[0].dtype
        and all(weight.is_contiguous() for weight in t.weights)
        and (kind.batch_invariant or not cpu.is_left_to_pytorch(t.x))
    )


def _by_product(kind: Seam, t: Operands, keeps: bool) -> Results | None:
    """Compute a call but for its second Linear layer by a product; None where that is declined."""
    if kind.returns_norm or not has_product(kind, t):
        return None
    is_one = len(t.weights) == 1
    if t.x.is_cpu:
        return cpu_seam.forward(kind, t, keeps) if is_one and t.rstd is None else None
    are_apart = is_one or _are_several(kind, t)
    # What modulates rows the kernels have no place for.
    if first(t, "groups") is not None or (has_sum(t) and t.rstd is not None):
        return None
    if not (are_apart or _is_pair(kind, t)):
        return None
    found = _on_hopper(kind, t, keeps, kind.activation) if kind.activation else None
    return _on_hopper(kind, t, keeps, "") if found is None and are_apart else found


def _are_several(kind: Seam, t: Operands) -> bool:
    """Return whether each of some weights has an output of its own, and nothing follows."""
    return 1 < len(t.weights) <= MOST_PARTS and not (kind.is_joined or kind.activation)


def _is_pair(kind: Seam, t: Operands) -> bool:
    """Return whether one weight gates another of its size."""
    if len(t.weights) != 2 or not (kind.is_joined and is_gate(kind.activation)):
        return False
    (gate, up), biases = t.weights, t.biases
    return gate.shape == up.shape and (biases[0] is None) == (biases[1] is None)


def _on_hopper(kind: Seam, t: Operands, keeps: bool, activation: str) -> Results | None:
    """Compute the same by a product whose epilogue applies an activation, or none."""
    rows = sm90.Rows(*dense(t.x, t.residual, t.mean, t.rstd))
    norm = (*norm_of(kind), passes.number_of(activation))
    up = [v for pair in zip(t.weights[1:], t.biases[1:], strict=True) for v in pair]
    parameters = known_parameters.of(t.gamma, t.beta, t.weights[0], t.biases[0], norm, *up)
    if not sm90.accepts(rows.x, parameters):
        return None
    keeps_h = keeps and activation != "" and not kind.recompute
    found = sm90.product(rows, parameters, kind.eps, keeps, keeps_h)
    if found is None:
        return None
    if activation:
        return found._replace(sum=found.sum if keeps or kind.returns_sum else None)
    outputs = list(found.outputs)
    return _results(kind, outputs, found.sum, None, found.mean, found.rstd, keeps)


def norm_of(kind: Seam) -> tuple[int, float]:
    """Return the number of a norm, and what is added to gamma."""
    return NORMALIZATIONS.index(kind.normalization), kind.weight_offset


def _around_products(kind: Seam, t: Operands, keeps: bool) -> Results:
    """Compute a call but for its second Linear layer by row passes around products."""
    frozen.require_values((*t.weights, *t.biases))
    t = _rows(kind, t)
    (x,) = dense(t.x)
    z = x.new_empty(x.shape, dtype=t.weights[0].dtype)
    total = torch.empty_like(x, memory_format=torch.contiguous_format) if has_sum(t) else None
    mean = rstd = None
    if keeps and t.rstd is None:
        mean, rstd = empty_statistics(x, kind.normalization == "layer_norm")
    passes.normalize(kind, t, x, total=total, z=z, mean=mean, rstd=rstd)
    both = _activated_product(kind, z, t, keeps and not kind.recompute)
    if both is None:
        return _results(kind, products_of(kind, z, t), total, z, mean, rstd, keeps)
    results = _results(kind, [], total, z, mean, rstd, keeps)
    return results._replace(outputs=[both[0]], products=[] if both[1] is None else [both[1]])


def _activated_product(
    kind: Seam, z: Tensor, t: Operands, keeps_h: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return the product of the rows just normalized, activated, and h; None without a kernel."""
    is_one = len(t.weights) == 1 or _is_pair(kind, t)
    if not kind.activation or not is_one or kind.batch_invariant:
        return None
    if not all(weight.is_contiguous() for weight in t.weights):
        return None
    layers = [Added(z, *layer) for layer in zip(t.weights, dense(*t.biases), strict=True)]
    up = layers[1] if len(layers) > 1 else None
    activation = passes.number_of(kind.activation)
    return linear.activated(layers[0], up, norm_of(kind)[0], activation, keeps_h)


def _rows(kind: Seam, t: Operands) -> Operands:
    """Return a call whose rows passes read as they do anywhere, if none may depend on that."""
    if not kind.batch_invariant:
        return t
    names = ("x", *NAMES["rows"])
    rows = aligned(*dense(*(getattr(t, name) for name in names)))
    return t._replace(**dict(zip(names, rows, strict=True)))


def _results(
    kind: Seam,
    products: list[Tensor],
    total: Tensor | None,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    keeps: bool,
) -> Results:
    """Return what is a result or kept, the products activated."""
    stay = keeps and kind.activation != "" and not kind.recompute
    return Results(
        [activated(kind, h, not stay) for h in products],
        total if keeps or kind.returns_sum else None,
        z if kind.returns_norm else None,
        mean,
        rstd,
        products if stay else [],
    )


def products_of(kind: Seam, z: Tensor, t: Operands) -> list[Tensor]:
    """Return the products of the rows just normalized and each weight, or all in one tensor."""
    norm = norm_of(kind)[0]
    if len(t.weights) > 1 and not kind.batch_invariant:
        found = several.products(z, t.weights, t.biases, norm, kind.is_joined)
        if found is not None:
            return found
    if kind.batch_invariant or not kind.is_joined or len(t.weights) == 1:
        products = [
            linear_add(Added(z, w, b), kind.batch_invariant, norm=norm, is_passed=True)
            for w, b in zip(t.weights, t.biases, strict=True)
        ]
        return [torch.cat(products, -1)] if kind.is_joined and len(products) > 1 else products
    sizes = [weight.shape[0] for weight in t.weights]
    joined = z.new_empty(*z.shape[:-1], sum(sizes))
    rows = z.flatten(0, -2)
    parts = joined.view(-1, sum(sizes)).split(sizes, -1)
    for part, weight, bias in zip(parts, t.weights, t.biases, strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=part)
        else:
            torch.addmm(bias, rows, weight.t(), out=part)
    return [joined]


def recomputed(kind: Seam, t: Operands) -> Sequence[Tensor]:
    """Return the products of a call once more, from x or the sum and its statistics."""
    t = _rows(kind, t)
    (x,) = dense(t.x)
    z = torch.empty_like(x, dtype=t.weights[0].dtype)
    passes.normalize(kind, t, x, z=z)
    return products_of(kind, z, t)


def activated(kind: Seam, h: Tensor, may_replace: bool = False) -> Tensor:
    """Return a product after the activation, if there is one: on a CPU in its place, if it may."""
    if not kind.activation:
        return h
    gated = is_gate(kind.activation)
    is_replaced = may_replace and not gated and h.is_cpu and h.is_contiguous()
    a = h if is_replaced else h.new_empty(*h.shape[:-1], h.shape[-1] // (2 if gated else 1))
    passes.activate(kind.activation, h, a)
    return a
