"""The op family's ops: schemas, fakes, and what is left to Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import composition
from fused_norm.activations import is_gate
from fused_norm.call.memory import is_transposed, laid_as_sum, statistics_dtype
from fused_norm.call.results import Results
from fused_norm.composition import (
    NAMED,
    NAMES,
    WITH_GRADIENT,
    Operands,
    Spec,
    flat,
    has_sum,
    summed,
)
from fused_norm.norms import NORMS
from fused_norm.ops.flops import count_flops
from fused_norm.ops.folding import folded
from fused_norm.ops.registration import SPEC_SCHEMA, TENSORS_SCHEMA, define

_OUT_WEIGHT, _OUT_BIAS = NAMED.index("out_weight"), NAMED.index("out_bias")


def _laid_sum(t: Operands, total: Tensor) -> Tensor:
    return laid_as_sum(total, *(getattr(t, name) for name in ("x", *NAMES["rows"])))


def places_of(wanted: Sequence[bool]) -> list[int]:
    """Return the indices of what is wanted."""
    return [place for place, w in enumerate(wanted) if w]


def flags_of(places: Sequence[int], count: int) -> list[bool]:
    """Return for each of `count` places whether it is listed."""
    return [place in places for place in range(count)]


def _fake_forward(*arguments: Any) -> list[Tensor]:
    t, spec, keeps = unpacked(arguments)
    x, rows = t.x, t.x.shape[:-1]
    dtype = t.weights[0].dtype
    sizes = [weight.shape[0] for weight in t.weights]
    sizes = [sum(sizes)] if spec.is_joined else sizes
    products = [x.new_empty((*rows, n), dtype=dtype) for n in sizes]
    outputs = products
    if t.out_weight is not None:
        outputs = [x.new_empty((*rows, t.out_weight.shape[0]), dtype=dtype)]
    elif spec.activation:
        halves = 2 if is_gate(spec.activation) else 1
        outputs = [x.new_empty((*rows, n // halves), dtype=dtype) for n in sizes]
    wide = statistics_dtype(x.dtype)
    keeps_statistics = keeps and t.rstd is None
    return Results(
        outputs,
        _laid_sum(t, x.new_empty(x.shape)) if has_sum(t) and (keeps or spec.returns_sum) else None,
        x.new_empty(x.shape, dtype=dtype) if spec.returns_norm else None,
        x.new_empty(rows, dtype=wide)
        if keeps_statistics and NORMS[spec.normalization].has_mean
        else None,
        x.new_empty(rows, dtype=wide) if keeps_statistics else None,
        [torch.empty_like(p) for p in products]
        if keeps and spec.activation and not spec.recompute
        else [],
    ).flat()


def _fake_gradient(weight: Tensor) -> Tensor:
    if is_transposed(weight):
        return weight.new_empty(weight.t().shape).t()
    return weight.new_empty(weight.shape)


def _fake_backward(*arguments: Any) -> list[Tensor]:
    *others, _, grad_outputs, wanted = arguments
    t, spec, _ = unpacked((*others, False))
    named = flat(t)[: len(NAMED)]
    found = [p if p is None else p.new_empty(p.shape) for p in named]
    dsum = grad_outputs[-1 - spec.returns_norm] if spec.returns_sum else None
    if dsum is not None:
        dx = t.x.new_empty(t.x.shape)
        found[0] = laid_as_sum(dx, dsum, dx)
    if t.out_weight is not None:
        found[_OUT_WEIGHT] = _fake_gradient(t.out_weight)
        found[_OUT_BIAS] = t.out_weight.new_empty(t.out_weight.shape[0])
    found += [_fake_gradient(w) for w in t.weights]
    found += [w.new_empty(w.shape[0]) for w in t.weights]
    return [p for p in (found[place] for place in wanted) if p is not None]


def unpacked(arguments: Sequence[Any]) -> tuple[Operands, Spec, bool]:
    """Return the tensors, the spec and whether a backward follows, from an op's arguments."""
    count = len(Operands._fields)
    tensors, (normalization, activation, eps, offset, *flags, keeps) = (
        arguments[:count],
        arguments[count:],
    )
    return Operands(*tensors), Spec(normalization, activation, eps, offset, *flags), keeps


def _empty_forward(spec: Spec, t: Operands, keeps: bool) -> list[Tensor]:
    """Return the results of a call without rows, features or outputs, with PyTorch's ops."""
    with composition.cast_as_recorded(t):
        outputs = composition.compute(spec, t)
    kept = _fake_forward(*t, *spec, keeps)
    given = len(outputs) - spec.returns_sum - spec.returns_norm
    results = Results.unflat([torch.zeros_like(k) for k in kept], spec, t, keeps)
    # A sum of x alone is no result of the op.
    total = None if results.sum is None else summed(t)
    norm = outputs[-1] if spec.returns_norm else None
    outputs = [torch.clone(o) for o in outputs[:given]]
    return results._replace(outputs=outputs, sum=total, norm=norm).flat()


def is_empty(t: Operands) -> bool:
    """Return whether a call has no rows, features or outputs."""
    return (
        not t.x.numel()
        or not all(w.numel() for w in t.weights)
        or (t.out_weight is not None and not t.out_weight.numel())
    )


def _forward_by_python(*arguments: Any) -> list[Tensor]:
    """Compute what C++ leaves to Python: frozen parameters and empty tensors."""
    t, spec, keeps = unpacked(arguments)
    if is_empty(t):
        return _empty_forward(spec, t, keeps)
    return folded(spec, t, keeps, arguments)


def joined(
    spec: Spec, t: Operands, grad_outputs: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Return the gradients of a call's results, where those of parts of an output are concatenated.

    Args:
        spec: What was computed.
        t: The tensors.
        grad_outputs: The gradients of the results; of one Linear layer's output possibly several,
            each of consecutive features.
    """
    count = len(grad_outputs) - spec.returns_sum - spec.returns_norm
    if count <= len(t.weights):
        return grad_outputs
    parts = [g for g in grad_outputs[:count] if g is not None]
    return [torch.cat(parts, -1), *grad_outputs[count:]]


def _backward_by_python(*arguments: Any) -> list[Tensor]:
    """Compute the gradients of a call with empty tensors."""
    *others, _, grad_outputs, wanted = arguments
    t, spec, _ = unpacked((*others, False))
    if not is_empty(t):
        raise RuntimeError(f"fused_norm has no kernels at hand for {t.x.dtype} on {t.x.device}")
    grads = joined(spec, t, grad_outputs)
    found = composition.gradients(spec, t, grads, flags_of(wanted, len(flat(t))))
    return [g for g in (found[place] for place in wanted) if g is not None]


forward = define(
    f"norm_linear_forward({TENSORS_SCHEMA}, {SPEC_SCHEMA}, bool keeps) -> Tensor[]",
    _fake_forward,
    _forward_by_python,
)
backward = define(
    f"norm_linear_backward({TENSORS_SCHEMA}, {SPEC_SCHEMA}, Tensor[] products, "
    "Tensor?[] grad_outputs, int[] wanted) -> Tensor[]",
    _fake_backward,
    _backward_by_python,
)
# Only in eager mode: it adds to its arguments.
backward_into = define(
    f"norm_linear_backward_into({TENSORS_SCHEMA}, {SPEC_SCHEMA}, Tensor[] products, "
    "Tensor?[] grad_outputs, int[] wanted, Tensor?[] main_grads) -> Tensor[]"
)


def _forward_flops(*arguments: Any) -> int:
    t, _, _ = unpacked(arguments)
    rows = t.x.numel() // max(t.x.shape[-1], 1)
    products = [*t.weights, *([] if t.out_weight is None else [t.out_weight])]
    return sum(2 * rows * w.numel() for w in products)


def _backward_flops(*arguments: Any) -> int:
    *others, _, _, places = arguments
    t, _, _ = unpacked((*others, False))
    wanted = flags_of(places, len(flat(t)))
    rows = t.x.numel() // max(t.x.shape[-1], 1)
    count = len(t.weights)
    norm, weights = any(wanted[: len(WITH_GRADIENT)]), wanted[-2 * count : -count]
    flops: int = sum(
        2 * rows * w.numel() * (norm + dw) for w, dw in zip(t.weights, weights, strict=True)
    )
    if t.out_weight is not None:
        out = wanted[NAMED.index("out_weight")]
        flops += 2 * rows * t.out_weight.numel() * (out + (norm or any(wanted[-2 * count :])))
    return flops


count_flops("norm_linear_forward", _forward_flops)
count_flops("norm_linear_backward", _backward_flops)
