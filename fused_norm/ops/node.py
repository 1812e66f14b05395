"""Calls the op family through the C++ node, if there is one: its backward runs without Python."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_norm.activations import ACTIVATIONS
from fused_norm.call.memory import own_eps
from fused_norm.chain import kernels, library
from fused_norm.composition import NAMED, Spec
from fused_norm.norms import NORMS, by_number
from fused_norm.ops.invariance import is_in_mode
from fused_norm.ops.norm_linear import gradients
from fused_norm.ops.rows import trainable_eps_gradients

# The named tensors that LayerNorm + Linear and the trained eps's norm lack: all after beta.
_ABSENT = (None,) * (len(NAMED) - 1 - NAMED.index("beta"))
_NUMBERS: dict[Any, int] = {None: 0, **{name: each.number for name, each in ACTIVATIONS.items()}}
_NAMES = {number: name or "" for name, number in _NUMBERS.items()}
_MOST_SPECS = 1000


class NodeSpec(ctypes.Structure):
    """`Spec` in chain.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("normalization", "activation")),
        *((name, ctypes.c_double) for name in ("eps", "weight_offset")),
        *((name, ctypes.c_bool) for name in ("is_joined", "returns_sum", "returns_norm")),
        *((name, ctypes.c_bool) for name in ("recompute", "invariant")),
        ("unused", ctypes.c_bool * 3),
    )


class _Specs(dict[tuple[Any, ...], bytes]):
    """Specs as bytes for C++, by the user's options: all fields except the last two, and names."""

    def __missing__(self, options: tuple[Any, ...]) -> bytes:
        """Return a new one.

        Raises:
            KeyError: If the normalization or the activation is unknown.
            TypeError: If eps or the offset is not a number.
        """
        normalization, activation, eps, offset, *flags = options
        if not (isinstance(eps, (float, int)) and isinstance(offset, (float, int))):
            raise TypeError
        numbers = NORMS[normalization].number, _NUMBERS[activation], float(eps), float(offset)
        if len(self) >= _MOST_SPECS:
            self.clear()
        spec = self[options] = bytes(NodeSpec(*numbers, *map(bool, flags)))
        return spec


_specs = _Specs()
# The constant in chain.h that replaces the number of a norm.
_TRAINABLE_EPS = -1
_TRAINABLE_EPS_SPEC = bytes(NodeSpec(normalization=_TRAINABLE_EPS, returns_norm=True))


@functools.cache
def module() -> Any:
    """Return the compiled module, None without one."""
    found = library.load_node()
    if found is not None:
        tell(found)
    return found


def tell(found: Any) -> None:
    """Tell the compiled module which functions to call."""
    chain = library.load()
    assert chain is not None
    found.set_chain(chain.chain_functions(), backward, kernels.is_alone)


def trainable_eps(x: Any, o: Any) -> Tensor | None:
    """Return the result of `trainable_eps_layer_norm`; None if it is left to Python.

    Args:
        x: Input of shape `[..., K]`.
        o: Tensor of one element.
    """
    if is_dynamo_compiling() or (found := module()) is None:
        return None
    y: Tensor | None = found.forward(_TRAINABLE_EPS_SPEC, x, None, o, None, *_ABSENT)
    return y


def forward(
    x: Any,
    weight: Any,
    bias: Any,
    options: Sequence[Any],
    second: tuple[Any, Any, Any] = (None, None, None),
    joined: bool = False,
    recompute: bool = False,
) -> Any:
    """Return the results of a call, one tensor or a tuple of them; None if it is left to Python.

    Args:
        x: As in `functional.norm_linear`, like everything that is not listed.
        weight: A weight, or several.
        bias: A bias or None, or as many as weights.
        options: Options of a norm, in the order of OPTIONS.
        second: Weight and bias of a Linear layer after the activation, and its residual.
        joined: Whether the products of all weights are one output.
        recompute: Whether the backward recomputes the product.
    """
    if is_dynamo_compiling() or is_in_mode() or (found := module()) is None:
        return None
    *tensors, normalization, eps, offset, activation, statistics, return_sum, return_norm = options
    mean = rstd = None
    if statistics is not None:
        mean, rstd, of, found_with = statistics
        if of != normalization or found_with != eps:
            return None
    try:
        if eps is None and NORMS[normalization].eps is None and type(x) is Tensor:
            eps = own_eps(x.dtype)
        spec = _specs[
            normalization, activation, eps, offset, joined, return_sum, return_norm, recompute
        ]
    except (KeyError, TypeError):
        return None
    if not isinstance(weight, (list, tuple)):
        return found.forward(spec, x, *tensors, mean, rstd, *second, weight, bias)
    biases = (None,) * len(weight) if bias is None else bias
    if not isinstance(biases, (list, tuple)) or len(biases) != len(weight):
        return None
    return found.forward(spec, x, *tensors, mean, rstd, *second, *weight, *biases)


def layernorm_linear(
    x: Any, gamma: Any, beta: Any, weight: Any, bias: Any, eps: Any
) -> Tensor | None:
    """Return the result of LayerNorm + Linear, with the defaults of OPTIONS for the rest.

    None if it is left to Python.

    Args:
        x: Input of shape `[..., K]`.
        gamma: Weight of the norm, or None.
        beta: Its bias, or None.
        weight: The weight.
        bias: Its bias, or None.
        eps: Added to the variance.
    """
    if is_dynamo_compiling() or is_in_mode() or (found := module()) is None:
        return None
    try:
        spec = _specs["layer_norm", None, eps, 0.0, False, False, False, False]
    except TypeError:
        return None
    y: Tensor | None = found.forward(spec, x, None, gamma, beta, *_ABSENT, weight, bias)
    return y


def backward(
    spec: bytes,
    tensors: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
    needed: bytes,
) -> Sequence[Tensor | None]:
    """Return the gradients that C++ leaves to Python, in the order of `composition.flat`.

    Args:
        spec: What was computed, a `NodeSpec`.
        tensors: The saved tensors, and then the kept products.
        grad_outputs: The gradients of the results, not all None.
        needed: Which tensors require a gradient.
    """
    of = NodeSpec.from_buffer_copy(spec)
    saved, products = tensors[: len(needed)], [t for t in tensors[len(needed) :] if t is not None]
    flags = [bool(each) for each in needed]
    if of.normalization == _TRAINABLE_EPS:
        x, o = (NAMED.index(name) for name in ("x", "gamma"))
        found: list[Tensor | None] = [None] * len(saved)
        found[x], found[o] = trainable_eps_gradients(
            grad_outputs[0], saved[x], saved[o], [flags[x], flags[o]]
        )
        return found
    named = Spec(
        by_number(of.normalization),
        _NAMES[of.activation],
        *(getattr(of, name) for name in ("eps", "weight_offset", "is_joined", "returns_sum")),
        *(getattr(of, name) for name in ("returns_norm", "recompute")),
    )
    return gradients(named, None, lambda: (saved, products), grad_outputs, flags)
