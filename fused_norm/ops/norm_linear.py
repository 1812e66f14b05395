"""A call of the op family: who computes it, and its gradients, in one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torch.compiler import is_dynamo_compiling

from fused_norm import composition
from fused_norm.call import frozen
from fused_norm.call.memory import LOW_PRECISION, in_memory
from fused_norm.call.results import Results
from fused_norm.chain import library
from fused_norm.composition import NAMED, NAMES, Operands, Spec, flat, has_sum, reached, unflat
from fused_norm.ops import norm_linear_ops as ops
from fused_norm.ops.invariance import require_invariant
from fused_norm.ops.main_grad import add, add_product, added, stand_in
from fused_norm.ops.operands import as_kernels_need, fits, is_host_bound
from fused_norm.ops.part_gradients import of_all_parts
from fused_norm.ops.registration import (
    each_once,
    is_compiling,
    is_forward_mode,
    is_profiled,
    is_watched,
    may_follow,
)
from fused_norm.ops.sharding import has_dtensor, over_shards

_SUMMANDS = [NAMED.index(name) for name in ("x", *NAMES["rows"])]
_NO_SUMMANDS: dict[str, Any] = dict.fromkeys(NAMES["rows"])
_LAST = NAMED.index("out_residual")
_GAMMA = NAMED.index("gamma")
# The arguments of the autograd function before the tensors.
_OPTIONS = 4


class NormLinear(torch.autograd.Function):
    """Gradients of the family. The forward saves x or the sum, parameters, statistics and h.

    The first arguments are the spec, for each weight None or a Parameter whose `main_grad` gets the
    gradient instead, whether x is added to the output, too, and the sizes of the parts in which the
    only output is returned, or None. The others are tensors in the order of `flat`.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, owners: Any, adds_x: bool, sizes: Any, *tensors: Any) -> Any:
        """Return the outputs, then the sum and the normalized rows if they are results."""
        t = unflat(tensors)
        if adds_x:
            t = t._replace(out_residual=t.x)
        results = Results.unflat(ops.forward(*t, *spec, True), spec, t, True)
        saved = t._replace(
            x=t.x if results.sum is None else results.sum,
            mean=t.mean if results.mean is None else results.mean,
            rstd=t.rstd if results.rstd is None else results.rstd,
            out_bias=None,
            out_residual=None,
            # Only gradients of what follows the products depend on biases.
            biases=t.biases
            if spec.activation or t.out_weight is not None
            else [None] * len(t.biases),
            **_NO_SUMMANDS,
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat(saved), *results.products)
        ctx.spec, ctx.owners, ctx.adds_x, ctx.count = spec, owners, adds_x, len(tensors)
        ctx.sizes = sizes
        found = _results(results, spec, t)
        return found if sizes is None else (*found[0].split(sizes, -1), *found[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the tensors that require one."""
        return (_backward if ctx.owners is None else _accumulate)(ctx, *grad_outputs)


def _results(results: Results, spec: Spec, t: Operands) -> tuple[Tensor, ...]:
    """Return what a call returns: of a sum of x alone, x."""
    total = t.x if results.sum is None else results.sum
    extras = (total,) * spec.returns_sum
    return (*results.outputs, *extras, *(() if results.norm is None else (results.norm,)))


def _backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[_OPTIONS:])
    if all(g is None for g in grad_outputs):
        return (None,) * (_OPTIONS + len(needed))
    given = grad_outputs if ctx.sizes is None else of_all_parts(grad_outputs, ctx.sizes)
    spec, grads = with_sum(ctx.spec, given) if ctx.adds_x else (ctx.spec, given)

    def saved() -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        tensors = ctx.saved_tensors
        return tensors[: ctx.count], tensors[ctx.count :]

    found = gradients(spec, ctx.owners, saved, grads, needed)
    return (*(None,) * _OPTIONS, *found)


def with_sum(spec: Spec, grad_outputs: Sequence[Tensor | None]) -> tuple[Spec, list[Tensor | None]]:
    """Return a call that adds x to its output as one that returns x: their gradients are the same.

    The norm's backward adds the gradient of what is returned as it stores that of x.

    Args:
        spec: What was computed, without a residual.
        grad_outputs: The gradients of its results.
    """
    found = list(grad_outputs)
    place = len(found) - spec.returns_norm - spec.returns_sum
    total = found[0]
    if spec.returns_sum and (dsum := found.pop(place)) is not None:
        total = dsum if total is None else total + dsum
    found.insert(place, total)
    return spec._replace(returns_sum=True), found


def gradients(
    spec: Spec,
    owners: Any,
    saved: Callable[[], tuple[Sequence[Tensor | None], Sequence[Tensor]]],
    grad_outputs: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of a call's tensors in the order of `flat`, None for those without.

    Args:
        spec: What was computed.
        owners: For each weight the Parameter that has a `main_grad`, or None.
        saved: Returns the saved tensors, in the order of `flat`, and the kept products.
        grad_outputs: The gradients of the results, not all None.
        needed: Which tensors require a gradient.
    """
    reaches = reached(spec, (len(needed) - len(NAMED)) // 2, grad_outputs)
    wanted = [n and r for n, r in zip(needed, reaches, strict=True)]
    # All summands of x share a gradient, and what is added at the end has the output's.
    wanted[0] = any(wanted[place] for place in _SUMMANDS)
    wanted[_LAST] = False
    for place in _SUMMANDS[1:]:
        wanted[place] = False
    if reaches[_GAMMA]:
        found = _computed(spec, owners, *saved(), grad_outputs, wanted)
    else:
        # Only the sum has a gradient.
        found = [None] * len(needed)
        found[0] = grad_outputs[-1 - spec.returns_norm]
    dx = found[0]
    for place in _SUMMANDS:
        found[place] = dx if needed[place] else None
    found[_LAST] = grad_outputs[0] if needed[_LAST] else None
    for place, owner in enumerate(owners or (), len(NAMED)):
        if owner is None or not wanted[place]:
            continue
        gradient = found[place]
        if gradient is not None:
            # No kernel has added it.
            add(owner, gradient)
        found[place] = stand_in(owner)
    return found


# A gradient that is added to a `main_grad` has no derivative.
_accumulate = once_differentiable(_backward)


def _computed(
    spec: Spec,
    owners: Any,
    tensors: Sequence[Tensor | None],
    products: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None],
    wanted: list[bool],
) -> list[Tensor | None]:
    """Return the gradients that are wanted, None for others.

    Args:
        spec: What was computed.
        owners: For each weight the Parameter that has a `main_grad`, or None.
        tensors: The saved tensors, in the order of `flat`.
        products: Kept products.
        grad_outputs: The gradients of the results.
        wanted: Which gradients are wanted.
    """
    t = unflat(tensors)
    if not is_compiling() and (_may_be_derived(grad_outputs) or not fits(spec, t)):
        if spec.batch_invariant:
            raise RuntimeError(
                "batch_invariant() has no derivatives of gradients, nor many at once"
            )
        return composition.gradients(spec, t, ops.joined(spec, t, grad_outputs), wanted)
    if is_compiling():
        # Inductor writes them so; the op would copy others alone.
        grad_outputs = [g if g is None else g.contiguous() for g in grad_outputs]
    if not is_watched():
        t, grad_outputs = unflat(in_memory(tensors)), in_memory(grad_outputs)
    arguments = (*t, *spec, list(products), list(grad_outputs), ops.places_of(wanted))
    if owners and not (is_watched() or ops.is_empty(t)):
        return _with_main_grads(spec, t, owners, arguments, len(wanted))
    results = iter(ops.backward(*arguments))
    return [next(results) if w else None for w in wanted]


def _with_main_grads(
    spec: Spec, t: Operands, owners: Sequence[Any], arguments: tuple[Any, ...], count: int
) -> list[Tensor | None]:
    """Return the gradients, None for those that have been added to a `main_grad`."""
    main_grads = [o if o is None else o.main_grad for o in owners]
    places = arguments[-1]
    results = ops.backward_into(*arguments, main_grads)
    found: list[Tensor | None] = [None] * count
    for place, gradient in zip(places, results, strict=False):
        found[place] = gradient
    for place, owner in enumerate(owners, len(NAMED)):
        gradient = found[place]
        if owner is None or gradient is None:
            continue
        if gradient.numel():
            # No kernel has added it: this is the product's gradient, and the last result its input.
            exact = gradient.is_cpu and gradient.dtype in LOW_PRECISION
            add_product(owner, gradient, _unrounded_rows(spec, t) if exact else results[-1])
        found[place] = None
    return found


def _unrounded_rows(spec: Spec, t: Operands) -> Tensor:
    """Return the normalized rows `[M, K]` in float32, like the operand of a CPU's product."""
    rows = unflat([None if v is None else v.float() for v in flat(t)])
    return composition.normalized(spec, rows.x, rows).reshape(-1, t.x.shape[-1])


def _may_be_derived(grad_outputs: Sequence[Tensor | None]) -> bool:
    """Return whether gradients may be differentiated or batched, which kernels do not support."""
    return (
        torch.is_grad_enabled()
        or is_forward_mode()
        or torch._C._are_functorch_transforms_active()
        or any(
            g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grad_outputs
        )
    )


def _is_left(t: Operands) -> bool:
    """Return whether PyTorch's ops are faster for a call, and its result is all that is wanted.

    The compiled node leaves frozen parameters to Python until a fold exists, which the node then
    looks up itself.
    """
    if frozen.has_offloaded() or not is_host_bound(t):
        return False
    return not (frozen.of(t.weights) and library.load_node() is not None)


# What `apply` does without an active transform, 3 us faster.
_apply = super(torch.autograd.Function, NormLinear).apply


def passes_x_on(t: Operands) -> bool:
    """Return whether a call without a residual may return x from its autograd function.

    The norm's backward then adds the gradients of all who read it there. Only in graphs that are
    compiled: elsewhere x is returned as it is, and may be written in place.

    Args:
        t: The tensors.
    """
    is_traced = is_compiling() and not is_dynamo_compiling()
    return is_traced and t.x.requires_grad and may_follow() and not has_dtensor(flat(t))


def call(
    spec: Spec,
    t: Operands,
    owners: Any = None,
    is_recorded: bool = False,
    sizes: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Compute a call; PyTorch's ops take what no kernel serves, including invalid calls.

    Args:
        spec: What to compute.
        t: The tensors.
        owners: For each weight the Parameter whose `main_grad` gets its gradient, or None.
        is_recorded: Whether a running profiler has recorded the call.
        sizes: Those of the parts in which the only output is returned if an autograd function
            records the call; None for one output.
    """
    if not is_recorded and is_profiled():
        name = "norm_linear" if t.out_weight is None else "norm_mlp"
        with record_function(f"fused_norm::{name}"):
            return call(spec, t, owners, True, sizes)
    may_be_bound = owners is None and not (spec.batch_invariant or is_watched())
    if may_be_bound and _is_left(t):
        return composition.compute(spec, t)
    if has_dtensor(flat(t)):
        if spec.batch_invariant:
            raise RuntimeError(
                "batch_invariant() does not reach the sums over processes of DTensors"
            )
        if owners is not None:
            raise NotImplementedError("main_grad does not work with DTensors")
        found = over_shards(call, spec, t)
        return composition.compute(spec, t) if found is None else found
    ready = as_kernels_need(spec, t)
    if ready is None:
        frozen.require_values(t.weights)
        if owners is not None:
            t = t._replace(weights=added(t.weights, owners))
        computed = composition.compute(spec, t)
        if spec.batch_invariant:
            # PyTorch's ops have raised no error.
            raise RuntimeError(
                f"batch_invariant() has no kernel for this call on a tensor of {t.x.dtype}: "
                "another layout, a transform, mixed dtypes, or one that no kernel is built for"
            )
        return computed
    if spec.batch_invariant:
        require_invariant(ready.x, ready.weights[0].dtype, (*ready.weights, ready.out_weight))
        # Given statistics may have been summed in any order.
        ready = ready._replace(mean=None, rstd=None)
    tensors = flat(ready) if is_watched() else in_memory(flat(ready))
    ready = unflat(tensors)
    if may_follow() and any(v is not None and v.requires_grad for v in tensors):
        apply = NormLinear.apply if is_watched() else _apply
        # Saved tensors have to be inputs or results: second derivatives reach x through them.
        is_sum = has_sum(ready) or spec.returns_sum
        adds_x = ready.out_residual is ready.x and not has_sum(ready)
        if adds_x:
            tensors = flat(ready._replace(out_residual=None))
        options = (spec._replace(returns_sum=is_sum), owners, adds_x, sizes)
        found = list(apply(*options, *each_once(tensors)))
        if is_sum and not spec.returns_sum:
            found.pop(-2 if spec.returns_norm else -1)
        return found
    results = Results.unflat(ops.forward(*ready, *spec, False), spec, ready, False)
    return [*_results(results, spec, ready)]
