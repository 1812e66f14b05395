"""The op family by the C++ node, where there is one: one call from Python forward, none back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.activations import ACTIVATIONS
from fused_norm.call.memory import own_eps
from fused_norm.chain import kernels, library
from fused_norm.composition import Operands, Spec
from fused_norm.native.cache import BuildError
from fused_norm.norms import NORMS, by_number
from fused_norm.ops.invariance import is_in_mode
from fused_norm.ops.norm_linear import gradients
from fused_norm.ops.rows import trainable_eps_gradients

_NORMS = {name: norm.number for name, norm in NORMS.items()}
_NUMBERS: dict[Any, int] = {None: 0, **{name: each.number for name, each in ACTIVATIONS.items()}}
_NAMED = Operands._fields[:-2]
# What LayerNorm + Linear has not, of the tensors by name: all after beta.
_ABSENT = (None,) * (len(_NAMED) - 1 - _NAMED.index("beta"))
_NO_FLAG = (False,) * 4
# Of chain.h, in place of the number of a norm.
_TRAINABLE_EPS = -1
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
    if eps is None and NORMS[normalization].eps is None and type(x) is Tensor:
        eps = own_eps(x.dtype)
    spec = (norm, number, eps, offset, joined, return_sum, return_norm, recompute)
    return _run("forward", x, *tensors, mean, rstd, *second, weight, bias, *spec)


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
    spec: tuple[Any, ...],
    tensors: list[Tensor | None],
    products: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None],
    needed: list[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients that C++ leaves to Python, in the order of `composition.flat`.

    Args:
        spec: What was computed, as C++ knows it.
        tensors: Those saved.
        products: Those kept.
        grad_outputs: Those of the results, of which one or more are there.
        needed: Which tensors need one.
    """
    norm, activation, *options = spec
    if norm == _TRAINABLE_EPS:
        x, o = (_NAMED.index(name) for name in ("x", "gamma"))
        found: list[Tensor | None] = [None] * len(tensors)
        found[x], found[o] = trainable_eps_gradients(
            grad_outputs[0], tensors[x], tensors[o], [needed[x], needed[o]]
        )
        return found
    named = Spec(by_number(norm), _NAMES[activation], *options)
    return gradients(named, None, lambda: (tensors, products), grad_outputs, needed)
