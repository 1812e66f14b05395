"""Checks the options of an op family call, and computes the call in C++ or in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from fused_norm.activations import is_gate, require_activation
from fused_norm.call.memory import ORDINARY, own_eps
from fused_norm.composition import OPTIONS, Operands, Spec, has_sum
from fused_norm.norms import require_norm
from fused_norm.ops import fp8, node
from fused_norm.ops import norm_linear as norm_linear_ops
from fused_norm.ops.autocast_fp8 import chosen
from fused_norm.ops.invariance import is_batch_invariant

# Weight and bias of a Linear layer after the activation, and its residual.
Second = tuple[Tensor | None, Tensor | None, Tensor | None]
# The Linear layers of a call, in the order of `family_call`'s arguments.
Layers = tuple[list[Tensor], list[Tensor | None], Second, bool, bool]


def named(options: Sequence[Any]) -> dict[str, Any]:
    """Return options by name."""
    return dict(zip(OPTIONS, options, strict=True))


def family_call(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    second: Second,
    joined: bool,
    recompute: bool,
    *,
    owners: Sequence[Tensor | None] | None = None,
    recipe: str | None = None,
    **options: Any,
) -> list[Tensor]:
    """Return the outputs, the sum and the normalized rows of a call, if wanted.

    Args:
        x: Input of shape `[..., K]`.
        weights: Those of the Linear layers on the norm.
        biases: One for each weight, or None.
        second: Weight and bias of a Linear layer after the activation, and its residual.
        joined: Whether the products of all weights are concatenated in one output.
        recompute: Whether the backward recomputes h.
        owners: The Parameter whose `main_grad` gets each weight's gradient, or None.
        recipe: The FP8 recipe, or None.
        options: Options of `norm_linear` that differ from their defaults.
    """
    if is_traced(x, weights, options.get("residual")):
        return handle_torch_function(
            family_call,
            tensors_of(x, weights),
            *(x, weights, biases, second, joined, recompute),
            owners=owners,
            recipe=recipe,
            **options,
        )
    recipe = chosen(recipe)
    values = tuple([options.get(name, default) for name, default in OPTIONS.items()])
    if owners is None and recipe is None:
        found = node.forward(x, weights, biases, values, second, joined, recompute)
        if found is not None:
            return [found] if isinstance(found, Tensor) else list(found)
    return checked_call(x, (weights, biases, second, joined, recompute), values, owners, recipe)


def checked_call(
    x: Tensor,
    layers: Layers,
    options: Sequence[Any],
    owners: Sequence[Tensor | None] | None = None,
    recipe: str | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    """Check the options of a call and compute it, without the node.

    Args:
        x: Input of shape `[..., K]`.
        layers: The Linear layers.
        options: All options, in the order of OPTIONS.
        owners: Parameters that have a `main_grad`.
        recipe: The FP8 recipe, or None.
        sizes: The features of parts in which the output of one Linear layer without an activation
            is returned, two or more; None for a single tensor. The parts are views of it, whose
            gradients are not concatenated where kernels read them as they are. Without owners.

    Raises:
        ValueError: If an option is unknown or does not fit the weights, or statistics belong to
            another norm.
    """
    weights, biases, second, joined, recompute = layers
    *tensors, normalization, eps, offset, activation, statistics, return_sum, return_norm = options
    exact = checked_eps(normalization, activation, eps, x)
    if len(weights) > 2 and activation is not None and is_gate(activation):
        raise ValueError(f"{activation} takes one weight or a pair of them, got {len(weights)}")
    mean = rstd = None
    if statistics is not None:
        mean, rstd, of, found_with = statistics
        if (of, found_with) != (normalization, exact):
            raise ValueError(
                f"statistics are for normalization={of!r} and eps={found_with}, "
                f"but got normalization={normalization!r} and eps={exact}"
            )
    t = Operands._make((x, *tensors, mean, rstd, *second, weights, biases))
    spec = Spec(
        normalization,
        activation or "",
        exact,
        float(offset),
        joined,
        return_sum and (has_sum(t) or (recipe is None and norm_linear_ops.passes_x_on(t))),
        return_norm,
        recompute,
        is_batch_invariant(),
    )
    parts = None if sizes is None else tuple(sizes)
    if recipe is None:
        results = norm_linear_ops.call(spec, t, owners, sizes=parts)
    else:
        results = fp8.call(spec, t, recipe, owners, parts)
    if parts is not None and len(results) == 1 + spec.returns_sum + spec.returns_norm:
        results[:1] = results[0].split(parts, -1)
    if return_sum and not spec.returns_sum:
        results.insert(len(results) - return_norm, x)
    return results


def parameters_of(weight: Any, bias: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and a bias, or None, for each."""
    if not isinstance(weight, (list, tuple)):
        return [weight], [bias]
    biases = [None] * len(weight) if bias is None else list(bias)
    if not weight or len(biases) != len(weight):
        raise ValueError(
            f"expected one or more weights and as many biases, got {len(weight)} and {len(biases)}"
        )
    return list(weight), biases


def checked_eps(normalization: str, activation: str | None, eps: float | None, x: Any) -> float:
    """Return eps, or PyTorch's default if it is None.

    Raises:
        ValueError: If the normalization or the activation is not known.
        TypeError: If eps is None with LayerNorm.
    """
    norm = require_norm(normalization)
    require_activation(activation)
    if eps is None:
        if norm.eps is None:
            return own_eps(x.dtype)
    elif isinstance(eps, (float, int)):
        return float(eps)
    # Raises PyTorch's own error if it is not a number.
    value: Any = eps
    norm.function(torch.ones(1), (1,), None, None, value)
    return float(value)


def tensors_of(x: Any, weight: Any) -> tuple[Any, ...]:
    """Return x and the weight, or the weights, in one tuple."""
    return (x, *weight) if isinstance(weight, (list, tuple)) else (x, weight)


def is_traced(x: Any, weight: Any, residual: Any) -> bool:
    """Return whether an argument is a proxy of `torch.fx`, whose tracer is to record the call.

    Args:
        x: The input.
        weight: A weight, or several.
        residual: Added to x, or None.
    """
    arguments = (*tensors_of(x, weight), residual)
    return not ORDINARY.issuperset(map(type, arguments)) and any(
        isinstance(each, Proxy) for each in arguments
    )
