"""The op family in C++, where that is built: one call from Python forward, none backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.backends import compiled, rows
from fused_norm.composition import ACTIVATIONS, NORMALIZATIONS, Operands, Seam
from fused_norm.native import node
from fused_norm.ops.rows import trainable_eps_gradients
from fused_norm.ops.seam import gradients

_IS_RMS_NORM = {name: number == 1 for number, name in enumerate(NORMALIZATIONS)}
_NUMBERS: dict[Any, int] = {None: 0, **{name: number for name, (number, _) in ACTIVATIONS.items()}}
_NAMED = Operands._fields[:-2]
_OUT_BIAS = _NAMED.index("out_bias")
_NAMES = {number: name or "" for name, number in _NUMBERS.items()}


@functools.cache
def module() -> Any:
    """Return the compiled module, None where there is none."""
    found = node.load()
    if found is not None:
        tell(found)
    return found


def tell(found: Any) -> None:
    """Give the compiled module what it calls of Python."""
    found.set_python(
        compiled.kernels,
        compiled.conditions,
        backward,
        rows.trainable_eps,
        trainable_eps_gradients,
    )


def trainable_eps(x: Any, o: Any) -> Tensor | None:
    """Return what `trainable_eps_layer_norm` does; None where Python has to.

    Args:
        x: Input of shape `[..., K]`.
        o: Tensor of one element.
    """
    if torch.compiler.is_compiling() or (run := module()) is None:
        return None
    found: Tensor | None = run.trainable_eps(x, o)
    return found


def forward(
    x: Any,
    weight: Any,
    bias: Any,
    normalization: Any = NORMALIZATIONS[0],
    gamma: Any = None,
    beta: Any = None,
    eps: Any = 1e-5,
    offset: Any = 0.0,
    scale: Any = None,
    shift: Any = None,
    residual: Any = None,
    activation: Any = None,
    statistics: Any = None,
    return_sum: bool = False,
    return_norm: bool = False,
    second: tuple[Any, Any, Any] = (None, None, None),
    joined: bool = False,
    recompute: bool = False,
) -> Any:
    """Return the results of a call, one tensor or a tuple of them; None where Python has to.

    Args:
        x: As `functional.norm_linear` takes it, like all that is not listed.
        weight: A weight, or several.
        bias: A bias or None, or as many.
        normalization: The norm.
        gamma: Its weight.
        beta: Its bias.
        eps: Added to the variance.
        offset: Added to gamma.
        scale: AdaLN's scale.
        shift: AdaLN's shift.
        residual: Added to x.
        activation: What follows the product.
        statistics: Those of the sum.
        return_sum: Whether the sum is a result.
        return_norm: Whether the normalized rows are.
        second: Weight and bias of a Linear layer after the activation, and what is added to it.
        joined: Whether the products of all weights are one output.
        recompute: Whether the backward computes the product again.
    """
    if torch.compiler.is_compiling() or (run := module()) is None:
        return None
    mean = rstd = None
    if statistics is not None:
        mean, rstd, of, found_with = statistics
        if of != normalization or found_with != eps:
            return None
    try:
        is_rms_norm, number = _IS_RMS_NORM[normalization], _NUMBERS[activation]
    except (KeyError, TypeError):
        return None
    return run.forward(
        *(x, residual, gamma, beta, scale, shift, mean, rstd, *second, weight, bias, is_rms_norm),
        *(number, eps, offset, joined, return_sum, return_norm, recompute),
    )


def backward(
    kind: tuple[Any, ...],
    tensors: list[Tensor | None],
    products: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None],
    wanted: list[bool],
) -> list[Tensor | None]:
    """Return the gradients that C++ leaves to Python, in the order of `composition.flat`.

    Args:
        kind: What was computed, as C++ knows it.
        tensors: Those saved.
        products: Those kept.
        grad_outputs: Those of the results.
        wanted: Which are.
    """
    is_rms_norm, activation, *options = kind
    seam = Seam(NORMALIZATIONS[is_rms_norm], _NAMES[activation], *options)
    return gradients(seam, None, _with_biases(tensors, wanted), products, grad_outputs, wanted)


def _with_biases(tensors: list[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the tensors with zeros for the biases that no gradient depends on."""
    complete = list(tensors)
    x = tensors[0]
    assert x is not None
    count = (len(tensors) - len(_NAMED)) // 2
    pairs = [(_OUT_BIAS, _OUT_BIAS - 1)] + [
        (len(_NAMED) + count + i, len(_NAMED) + i) for i in range(count)
    ]
    for place, weight in pairs:
        like = tensors[weight]
        if wanted[place] and tensors[place] is None and like is not None:
            complete[place] = like.new_zeros(like.shape[0])
    return complete
