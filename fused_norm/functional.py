"""A norm, the Linear layers that read it, and what comes before and after, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from fused_norm import composition
from fused_norm.activations import GATES
from fused_norm.composition import Added, Operands, Spec
from fused_norm.ops import linear_add as linear_add_ops
from fused_norm.ops import node
from fused_norm.ops.autocast_fp8 import chosen
from fused_norm.ops.family import (
    checked_call,
    checked_eps,
    is_traced,
    named,
    parameters_of,
    tensors_of,
)
from fused_norm.ops.fp8 import scaled_linear
from fused_norm.ops.invariance import is_batch_invariant
from fused_norm.ops.linear_gated_add import linear_gated_add
from fused_norm.ops.statistics import add_statistics, row_statistics

_GATES = frozenset(GATES.values())


class Statistics(NamedTuple):
    """The statistics that `linear_add` returns for the norm after it.

    Attributes:
        mean: Mean of each row, shape `[...]`; None for RMSNorm.
        rstd: Reciprocal standard deviation of each row, for RMSNorm reciprocal root mean square.
        normalization: The norm that they are for.
        eps: The eps that `rstd` contains.
    """

    mean: Tensor | None
    rstd: Tensor
    normalization: str
    eps: float


def fused_layernorm_linear(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Apply layer normalization over the last dimension, then an affine map.

    Equivalent to `F.linear(F.layer_norm(x, (K,), ln_weight, ln_bias, eps), linear_weight,
    linear_bias)`, with the same broadcasting, autocast behavior and errors. Statistics and sums
    are computed in float32 (float64 for float64). The backward saves the inputs and the mean and
    rstd of each row, nothing else. Sums run in a fixed order, so every run gives the same bits.

    Args:
        x: Input of shape `[..., K]`.
        ln_weight: Gamma, shape `[K]`, or None for ones. In the dtype of `x`, or float32 with
            bfloat16 and float16.
        ln_bias: Beta, shape `[K]`, or None for zeros, in the dtype of `ln_weight`.
        linear_weight: Weight of shape `[N, K]` in the dtype of `x`.
        linear_bias: Bias of shape `[N]` in the dtype of `x`, or None for zeros.
        eps: Added to the variance before the square root.

    Returns:
        Tensor of shape `[..., N]` with the dtype of `x` (of autocast, under autocast).

    Raises:
        RuntimeError: As in `F.layer_norm` and `F.linear`, if shapes, dtypes or devices disagree.
        TypeError: As in PyTorch, if an argument is not a tensor.
        NotImplementedError: As in PyTorch, for a dtype that has no LayerNorm.
    """
    recipe = chosen(None)
    if recipe is None:
        y = node.layernorm_linear(x, ln_weight, ln_bias, linear_weight, linear_bias, eps)
        if y is not None:
            return y
    if is_traced(x, linear_weight, None):
        return handle_torch_function(
            fused_layernorm_linear,
            (x, linear_weight),
            x,
            ln_weight,
            ln_bias,
            linear_weight,
            linear_bias,
            eps,
        )
    if not isinstance(eps, (float, int)):
        # PyTorch's ops raise the error, if there is one.
        parameters = [linear_weight], [linear_bias]
        t = Operands(x, None, ln_weight, ln_bias, *[None] * 7, *parameters)
        return composition.compute(Spec(eps=eps), t)[0]
    norm = (None, ln_weight, ln_bias, None, None, "layer_norm", eps, 0.0)
    layers = ([linear_weight], [linear_bias], (None, None, None), False, False)
    return checked_call(x, layers, (*norm, None, None, False, False), recipe=recipe)[0]


def norm_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    normalization: str = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = 1e-5,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    statistics: Statistics | None = None,
    return_sum: bool = False,
    return_norm: bool = False,
    recipe: str | None = None,
) -> Any:
    """Apply a norm over the last dimension, one or more Linear layers, and an activation.

        s = x + residual;  z = norm(s) (norm_weight + weight_offset) + norm_bias
        z = z (1 + scale) + shift;  h = z W^T + b;  y = activation(h)

    Equivalent to that composition of PyTorch's ops (`F.layer_norm` or `F.rms_norm`, `F.linear`, the
    activation), with its broadcasting, autocast behavior and errors. Statistics, modulation and
    activations are computed in float32 (float64 for float64), and results are rounded once. The
    backward saves x (or the residual sum), the parameters, mean and rstd and, before an activation,
    h. Sums run in a fixed order, so every run gives the same bits.

    Args:
        x: Input of shape `[..., K]`.
        weight: Weight of shape `[N, K]` in the dtype of `x`, or a sequence of weights.
        bias: Bias of shape `[N]`, or None. For several weights, a bias or None for each, or None.
        normalization: `"layer_norm"` or `"rms_norm"`.
        norm_weight: Gamma, shape `[K]`, or None for ones. In the dtype of `x`, or float32 with
            bfloat16 and float16.
        norm_bias: Beta, shape `[K]`, or None for zeros, in the dtype of `norm_weight`.
        eps: Added to the variance, or to the mean square for RMSNorm. None, for RMSNorm only,
            means PyTorch's own, as in `F.rms_norm`.
        weight_offset: Added to `norm_weight`: 1.0 for a gamma that is kept around zero.
        scale: AdaLN's scale, broadcast against `x`.
        shift: AdaLN's shift, broadcast against `x`.
        residual: Added to `x` before the norm; of its shape.
        activation: None, `"relu"`, `"gelu"`, `"gelu_tanh"`, `"quick_gelu"` or `"silu"`; or a gate,
            `"swiglu"`, `"geglu"`, `"geglu_tanh"` or `"reglu"`, on one weight `[2N, K]` with the
            gate's half first, or on a pair (gate, up).
        statistics: Those of the sum, from `linear_add`, so that they are not computed again.
        return_sum: Whether to return `x + residual` as well, in the dtype of `x`.
        return_norm: Whether to return the normalized rows as well.
        recipe: `"rowwise"`, `"tensorwise"`, `"rowwise_with_gw_hp"` or `"blockwise"` for products in
            FP8, forward and backward (`fused_norm.recipes`); None for those of `autocast_fp8`, `""`
            for none even there.

    Returns:
        Tensor of shape `[..., N]`, or for several weights, except with a gate, a tuple of them.
        With `return_sum` or `return_norm`, a tuple of that, the sum and the normalized rows.

    Raises:
        ValueError: If the normalization or the activation is unknown, a gate has more than two
            weights, the statistics are for another norm, or the recipe is unknown.
        RuntimeError: As in PyTorch's ops, if shapes, dtypes or devices disagree; with a recipe, if
            the device has no FP8, or features or outputs are not multiples of 16.
        TypeError: As in PyTorch, if an argument is not a tensor.
    """
    gated = activation in _GATES
    tensors = (residual, norm_weight, norm_bias, scale, shift)
    rest = (activation, statistics, return_sum, return_norm)
    options = (*tensors, normalization, eps, weight_offset, *rest)
    given, recipe = recipe, chosen(recipe)
    found = None if recipe else node.forward(x, weight, bias, options, joined=gated)
    if found is not None:
        return found if gated or not isinstance(weight, (list, tuple)) else _grouped(found, weight)
    if is_traced(x, weight, residual):
        relevant = tensors_of(x, weight)
        return handle_torch_function(
            norm_linear, relevant, x, weight, bias, recipe=recipe or given, **named(options)
        )
    weights, biases = parameters_of(weight, bias)
    layers = (weights, biases, (None, None, None), gated, False)
    results = checked_call(x, layers, options, recipe=recipe)
    if not isinstance(weight, (list, tuple)) or gated:
        return results[0] if len(results) == 1 else tuple(results)
    return _grouped(tuple(results), weight)


def _grouped(results: Any, weight: Sequence[Tensor]) -> Any:
    """Return the outputs of several weights in a tuple, followed by the other results."""
    if isinstance(results, Tensor):
        return (results,)
    ys, extras = results[: len(weight)], results[len(weight) :]
    return (ys, *extras) if extras else ys


def norm_mlp(
    x: Tensor,
    fc1_weight: Tensor | Sequence[Tensor],
    fc1_bias: Tensor | Sequence[Tensor | None] | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None = None,
    *,
    activation: str,
    residual_out: Tensor | None = None,
    recompute: bool = False,
    normalization: str = "layer_norm",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = 1e-5,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: Statistics | None = None,
    return_sum: bool = False,
    return_norm: bool = False,
    recipe: str | None = None,
) -> Any:
    """Apply a norm over the last dimension, a Linear layer, an activation or a gate, and another.

        h = norm(x + residual) W1^T + b1;  y = activation(h) W2^T + b2 + residual_out

    The backward saves x (or the residual sum), the parameters, mean, rstd and h; with
    `recompute=True`, it computes h again instead.

    Args:
        x: Input of shape `[..., K]`.
        fc1_weight: Shape `[N, K]`; before a gate `[2N, K]` with the gate's half first, or a pair.
        fc1_bias: Shape `[N]`, or None; before a gate `[2N]`, or a pair.
        fc2_weight: Shape `[K2, N]`.
        fc2_bias: Shape `[K2]`, or None.
        activation: As in `norm_linear`.
        residual_out: Added at the end, shape `[..., K2]`, or None.
        recompute: Whether the backward computes h again instead of saving it.
        normalization: As in `norm_linear`, and so are the arguments after it.
        norm_weight: Gamma, shape `[K]`, or None.
        norm_bias: Beta, shape `[K]`, or None.
        eps: Added to the variance, or to the mean square.
        weight_offset: Added to `norm_weight`.
        scale: AdaLN's scale, broadcast against `x`.
        shift: AdaLN's shift, broadcast against `x`.
        residual: Added to `x` before the norm, in its shape.
        statistics: Those of the sum, from `linear_add`.
        return_sum: Whether to return `x + residual` as well.
        return_norm: Whether to return the normalized rows as well.
        recipe: As in `norm_linear`, for both Linear layers.

    Returns:
        Tensor of shape `[..., K2]`; with `return_sum` or `return_norm`, a tuple starting with it.

    Raises:
        ValueError: As in `norm_linear`.
        RuntimeError: As in PyTorch's ops, if shapes, dtypes or devices disagree.
        TypeError: As in PyTorch, if an argument is not a tensor.
    """
    if residual_out is x and type(x) is Tensor and x.requires_grad and not x.is_contiguous():
        # Autograd lays out the sum of two gradients like the first one. For x + mlp(x) that is the
        # residual's if the other one comes through a view.
        x = x.view_as(x)
    second = (fc2_weight, fc2_bias, residual_out)
    norm = (residual, norm_weight, norm_bias, scale, shift, normalization, eps, weight_offset)
    options = (*norm, activation, statistics, return_sum, return_norm)
    given, recipe = recipe, chosen(recipe)
    if recipe is None:
        found = node.forward(x, fc1_weight, fc1_bias, options, second, True, recompute)
        if found is not None:
            return found
    if is_traced(x, fc1_weight, residual):
        return handle_torch_function(
            norm_mlp,
            tensors_of(x, fc1_weight),
            *(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias),
            residual_out=residual_out,
            recompute=recompute,
            recipe=recipe or given,
            **named(options),
        )
    weights, biases = parameters_of(fc1_weight, fc1_bias)
    layers = (weights, biases, second, True, recompute)
    results = checked_call(x, layers, options, recipe=recipe)
    return results[0] if len(results) == 1 else tuple(results)


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    gate: Tensor | None = None,
    normalization: str | None = "layer_norm",
    eps: float | None = 1e-5,
    recipe: str | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Apply a Linear layer, add a residual, and compute the statistics for the norm that follows.

    Equivalent to `s = residual + F.linear(x, weight, bias)`. The statistics carry no gradient;
    `norm_linear(s, ..., statistics=statistics)` returns the whole gradient through s. On Hopper in
    bfloat16 and float16, and with a recipe, the product itself adds the residual and rounds once.

    With a gate, as in adaLN-Zero, `s = torch.addcmul(residual, gate, F.linear(x, weight, bias))`.
    In inference on Hopper in bfloat16 and float16, the product also multiplies by the gate if all
    rows have the same one, or each group of a multiple of 128 rows has its own, as with `[B, 1, N]`
    for `[B, 256, N]`. Otherwise PyTorch's ops do.

    Args:
        x: Input of shape `[..., K]`.
        weight: Shape `[N, K]`.
        bias: Shape `[N]`, or None.
        residual: Shape `[..., N]`.
        gate: Multiplies the Linear layer's result before the sum, against which it broadcasts; None
            for no gate.
        normalization: The norm that follows, `"layer_norm"` or `"rms_norm"`; None for none.
        eps: Its eps.
        recipe: As in `norm_linear`.

    Returns:
        The sum, shape `[..., N]`, and its statistics, None if none were asked for.

    Raises:
        ValueError: If the normalization or the recipe is unknown.
        RuntimeError: As in PyTorch's ops, if shapes, dtypes or devices disagree; or with a recipe,
            as in `norm_linear`.
        TypeError: As in PyTorch, if an argument is not a tensor.
    """
    given, recipe = recipe, chosen(recipe)
    if is_traced(x, weight, residual):
        return handle_torch_function(
            linear_add,
            tensors_of(x, weight),
            *(x, weight, bias, residual),
            gate=gate,
            normalization=normalization,
            eps=eps,
            recipe=recipe or given,
        )
    invariant = is_batch_invariant()
    added = Added(x, weight, bias, residual)
    is_added = gate is not None or recipe is not None
    is_added = is_added or (not invariant and linear_add_ops.adds_in_product(added))
    if normalization is None or is_added:
        if gate is not None and recipe is not None:
            y = scaled_linear(x, weight, bias, recipe=recipe)
            total = torch.addcmul(residual, gate, y)
        elif gate is not None:
            total = linear_gated_add(added, gate, invariant)
        elif recipe is not None:
            total = scaled_linear(*added, recipe=recipe)
        else:
            total = linear_add_ops.linear_add(added, invariant)
        if normalization is None:
            return total, None
        exact = checked_eps(normalization, None, eps, residual)
        mean, rstd = row_statistics(total, normalization, exact)
        return total, Statistics(mean, rstd, normalization, exact)
    if invariant:
        y = linear_add_ops.linear_add(Added(x, weight, bias), True)
    else:
        y = torch.nn.functional.linear(x, weight, bias)
    exact = checked_eps(normalization, None, eps, y)
    total, mean, rstd = add_statistics(y, residual, normalization, exact)
    return total, Statistics(mean, rstd, normalization, exact)
