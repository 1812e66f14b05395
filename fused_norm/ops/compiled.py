"""The op family in C++, where that is built: one call from Python forward, and none backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.backends import compiled, rows, sm90_kernels
from fused_norm.call import folds
from fused_norm.composition import ACTIVATIONS, NORMALIZATIONS, Operands, Seam
from fused_norm.native import node
from fused_norm.native.cache import BuildError
from fused_norm.ops.invariance import is_in_mode
from fused_norm.ops.registration import ask_first
from fused_norm.ops.rows import trainable_eps_gradients
from fused_norm.ops.seam import gradients

_NORMS = {name: number for number, name in enumerate(NORMALIZATIONS)}
_NUMBERS: dict[Any, int] = {None: 0, **{name: number for name, (number, _) in ACTIVATIONS.items()}}
_NAMED = Operands._fields[:-2]
_OUT_BIAS = _NAMED.index("out_bias")
# What LayerNorm + Linear has not, of the tensors by name: all after beta.
_ABSENT = (None,) * (len(_NAMED) - 1 - _NAMED.index("beta"))
_NO_FLAG = (False,) * 4
# The arguments of the op's backward that are the forward's.
_OF_BACKWARD = len(Operands._fields) + len(Seam._fields)
_NAMES = {number: name or "" for name, number in _NUMBERS.items()}


@functools.cache
def module() -> Any:
    """Return the compiled module, None where there is none."""
    found = node.load()
    if found is not None:
        tell(found)
    return found


def tell(found: Any) -> None:
    """Give the compiled module the Python functions that it calls."""
    found.set_python(
        compiled.kernels,
        sm90_kernels.is_alone,
        folds.promise,
        # Not there without CUDA. What PyTorch documents is a turn in Python around it.
        getattr(torch._C, "_cuda_isCurrentStreamCapturing", None),
        compiled.fold,
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
    try:
        found: Tensor | None = run.trainable_eps(x, o)
    except BuildError:
        return None
    return found


def forward(
    x: Any,
    weight: Any,
    bias: Any,
    options: Sequence[Any],
    second: tuple[Any, Any, Any] = (None, None, None),
    joined: bool = False,
    recompute: bool = False,
) -> Any:
    """Return the results of a call, one tensor or a tuple of them; None where Python has to.

    Args:
        x: As `functional.norm_linear` takes it, like all that is not listed.
        weight: A weight, or several.
        bias: A bias or None, or as many.
        options: Those of a norm, in the order of OPTIONS.
        second: Weight and bias of a Linear layer after the activation, and what is added to it.
        joined: Whether the products of all weights are one output.
        recompute: Whether the backward computes the product again.
    """
    if torch.compiler.is_compiling() or is_in_mode() or (run := module()) is None:
        return None
    *tensors, normalization, eps, offset, activation, statistics, return_sum, return_norm = options
    mean = rstd = None
    if statistics is not None:
        mean, rstd, of, found_with = statistics
        if of != normalization or found_with != eps:
            return None
    try:
        norm, number = _NORMS[normalization], _NUMBERS[activation]
    except (KeyError, TypeError):
        return None
    kind = (norm, number, eps, offset, joined, return_sum, return_norm, recompute)
    try:
        return run.forward(x, *tensors, mean, rstd, *second, weight, bias, *kind)
    except BuildError:
        # There are no kernels for it: Python finds PyTorch's ops, and says what is missing.
        return None


def _op_forward(*arguments: Any) -> list[Tensor] | None:
    """Return what the op `seam_forward` does; None where Python has to."""
    (*tensors, norm, activation, eps, offset, joined, total, rows, again, invariant, keeps) = (
        arguments
    )
    if invariant or (run := module()) is None:
        return None
    flags = (joined, total, rows, again, keeps)
    try:
        found: list[Tensor] | None
        found = run.op_forward(
            *tensors, _NORMS[norm], _NUMBERS[activation or None], eps, offset, *flags
        )
    except BuildError:
        return None
    return found


def _op_backward(*arguments: Any) -> list[Tensor] | None:
    """Return what the op `seam_backward` does; None where Python has to."""
    (*tensors, norm, activation, eps, offset, joined, total, rows, again, invariant) = arguments[
        :_OF_BACKWARD
    ]
    if invariant or (run := module()) is None:
        return None
    options = (eps, offset, joined, total, rows, again, *arguments[_OF_BACKWARD:])
    try:
        found: list[Tensor] | None
        found = run.op_backward(*tensors, _NORMS[norm], _NUMBERS[activation or None], *options)
    except BuildError:
        return None
    return found


def _op_linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    invariant: bool = False,
) -> Tensor | None:
    """Return what the op `linear_add` does; None where Python has to."""
    if invariant or (run := module()) is None:
        return None
    try:
        found: Tensor | None = run.op_linear_add(x, weight, bias, residual)
    except BuildError:
        return None
    return found


def _op_linear_add_backward(*arguments: Any) -> list[Tensor] | None:
    """Return what the op `linear_add_backward` does; None where Python has to."""
    if (run := module()) is None:
        return None
    try:
        found: list[Tensor] | None = run.op_linear_add_backward(*arguments)
    except BuildError:
        return None
    return found


# Compiled graphs run the ops, where Python would take longer than the kernels of a small model.
ask_first("seam_forward", _op_forward)
ask_first("seam_backward", _op_backward)
ask_first("linear_add", _op_linear_add)
ask_first("linear_add_backward", _op_linear_add_backward)


def layernorm_linear(
    x: Any, gamma: Any, beta: Any, weight: Any, bias: Any, eps: Any
) -> Tensor | None:
    """Return the result of LayerNorm + Linear, what is left away being as OPTIONS has it.

    None where Python has to.

    Args:
        x: Input of shape `[..., K]`.
        gamma: Weight of the norm, or None.
        beta: Its bias, or None.
        weight: The weight.
        bias: Its bias, or None.
        eps: Added to the variance.
    """
    if torch.compiler.is_compiling() or is_in_mode() or (run := module()) is None:
        return None
    try:
        found: Tensor | None
        found = run.forward(x, None, gamma, beta, *_ABSENT, weight, bias, 0, 0, eps, 0.0, *_NO_FLAG)
    except BuildError:
        return None
    return found


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
    norm, activation, *options = kind
    seam = Seam(NORMALIZATIONS[norm], _NAMES[activation], *options)
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
