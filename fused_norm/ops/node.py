"""The op family by the C++ node, where there is one: one call from Python forward, none back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.call.memory import own_eps
from fused_norm.chain import kernels, library, rows
from fused_norm.composition import ACTIVATIONS, NORMALIZATIONS, Operands, Seam
from fused_norm.native.cache import BuildError
from fused_norm.ops.invariance import is_in_mode
from fused_norm.ops.norm_linear import gradients
from fused_norm.ops.rows import trainable_eps_gradients

_NORMS = {name: number for number, name in enumerate(NORMALIZATIONS)}
_NUMBERS: dict[Any, int] = {None: 0, **{name: number for name, (number, _) in ACTIVATIONS.items()}}
_NAMED = Operands._fields[:-2]
# What LayerNorm + Linear has not, of the tensors by name: all after beta.
_ABSENT = (None,) * (len(_NAMED) - 1 - _NAMED.index("beta"))
_NO_FLAG = (False,) * 4
_NAMES = {number: name or "" for name, number in _NUMBERS.items()}


@functools.cache
def module() -> Any:
    """Return the compiled module, None where there is none."""
    found = library.load_node()
    if found is not None:
        tell(found)
    return found


def tell(found: Any) -> None:
    """Give the compiled module what it calls."""
    found.set_chain(str(library.path()), backward, kernels.is_alone)
    found.set_rows(rows.trainable_eps, trainable_eps_gradients)


def _run(name: str, *arguments: Any) -> Any:
    """Return what a function of the compiled module does; None where Python has to."""
    if (found := module()) is None:
        return None
    try:
        return getattr(found, name)(*arguments)
    except BuildError:
        # There are no kernels for it: Python finds PyTorch's ops, and says what is missing.
        return None


def trainable_eps(x: Any, o: Any) -> Tensor | None:
    """Return what `trainable_eps_layer_norm` does; None where Python has to.

    Args:
        x: Input of shape `[..., K]`.
        o: Tensor of one element.
    """
    if torch.compiler.is_compiling():
        return None
    found: Tensor | None = _run("trainable_eps", x, o)
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
    if torch.compiler.is_compiling() or is_in_mode() or module() is None:
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
    if eps is None and normalization == "rms_norm" and type(x) is Tensor:
        eps = own_eps(x.dtype)
    kind = (norm, number, eps, offset, joined, return_sum, return_norm, recompute)
    return _run("forward", x, *tensors, mean, rstd, *second, weight, bias, *kind)


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
    if torch.compiler.is_compiling() or is_in_mode():
        return None
    found: Tensor | None
    found = _run("forward", x, None, gamma, beta, *_ABSENT, weight, bias, 0, 0, eps, 0.0, *_NO_FLAG)
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
    return gradients(seam, None, tensors, products, grad_outputs, wanted)
