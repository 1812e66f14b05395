"""The activations and gates: all that the library knows of each, in a table.

Functions, modules, models and MAX graphs read it. The kernels are in op/gemm/activation.mojo, under
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.reference import widened

# The number of a gate is that of its activation plus this.
GATED = 8


class Activation(NamedTuple):
    """An activation, or the gate `activation(h[..., :N]) * h[..., N:]` that uses it.

    Attributes:
        number: Its number in the record of a call.
        function: The activation.
        gradient: Returns the gradient of the argument from the result's and the argument.
        gate: The name of the gate that uses it, `""` for a gate, or if there is none.
        targets: PyTorch's functions that compute it in a graph; it may also be decomposed.
        arguments: The names of their arguments.
    """

    number: int
    function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    gate: str = ""
    targets: tuple[Any, ...] = ()
    arguments: str = "input"


def _gelu_tanh(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


def _quick_gelu(h: Tensor) -> Tensor:
    return h * torch.sigmoid(1.702 * h)


def _relu_gradient(da: Tensor, h: Tensor) -> Tensor:
    dh: Tensor = torch.ops.aten.threshold_backward(da, h, 0)
    return dh


def _gelu_tanh_gradient(da: Tensor, h: Tensor) -> Tensor:
    dh: Tensor = torch.ops.aten.gelu_backward(da, h, approximate="tanh")
    return dh


def _quick_gelu_gradient(da: Tensor, h: Tensor) -> Tensor:
    share = torch.sigmoid(1.702 * h)
    return da * share * (1 + 1.702 * h * (1 - share))


_gelu_targets = (F.gelu, torch._C._nn.gelu)
_gelu_gradient, _silu_gradient = torch.ops.aten.gelu_backward, torch.ops.aten.silu_backward
PLAIN: dict[str, Activation] = {
    "relu": Activation(1, F.relu, _relu_gradient, "reglu", (F.relu, torch.relu)),
    "gelu": Activation(2, F.gelu, _gelu_gradient, "geglu", _gelu_targets, "input approximate"),
    "gelu_tanh": Activation(3, _gelu_tanh, _gelu_tanh_gradient, "geglu_tanh"),
    "quick_gelu": Activation(4, _quick_gelu, _quick_gelu_gradient),
    "silu": Activation(5, F.silu, _silu_gradient, "swiglu", (F.silu,)),
}
GATES: dict[str, str] = {name: each.gate for name, each in PLAIN.items() if each.gate}
"""The gate that uses each activation."""
ACTIVATIONS: dict[str, Activation] = PLAIN | {
    gate: Activation(PLAIN[name].number + GATED, PLAIN[name].function, PLAIN[name].gradient)
    for name, gate in GATES.items()
}


def number_of(activation: str) -> int:
    """Return the number of an activation in the record.

    Args:
        activation: One of ACTIVATIONS, or `""` for none.
    """
    return ACTIVATIONS[activation].number if activation else 0


def is_gate(activation: str) -> bool:
    """Return whether an activation takes two halves, one of which gates the other."""
    return number_of(activation) >= GATED


def require_activation(name: Any) -> None:
    """Raise unless an activation is known, or None.

    Raises:
        ValueError: If there is none of that name.
    """
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {tuple(ACTIVATIONS)}, got {name!r}")


def activated(activation: str, h: Tensor) -> Tensor:
    """Return an activation of h, in its dtype; a gate's result is half as wide as h.

    Args:
        activation: One of ACTIVATIONS, or `""` for none.
        h: Of shape `[..., N]`, for a gate `[..., 2N]`, the gate first.
    """
    if not activation:
        return h
    function = ACTIVATIONS[activation].function
    if not is_gate(activation):
        return function(h)
    gate, up = widened(h).chunk(2, -1)
    return (function(gate) * up).to(h.dtype)


def activation_gradient(activation: str, da: Tensor, h: Tensor) -> Tensor:
    """Return the gradient of h from its activation's, in the dtype of h.

    Args:
        activation: One of ACTIVATIONS.
        da: Of shape `[..., N]`.
        h: Of shape `[..., N]`, for a gate `[..., 2N]`, the gate first.
    """
    function, gradient = ACTIVATIONS[activation].function, ACTIVATIONS[activation].gradient
    da, wide = widened(da), widened(h)
    if not is_gate(activation):
        return gradient(da, wide).to(h.dtype)
    gate, up = wide.chunk(2, -1)
    return torch.cat([gradient(da * up, gate), da * function(gate)], -1).to(h.dtype)


def after_products(products: list[Tensor], activation: str, is_joined: bool) -> list[Tensor]:
    """Return the activation of each product, or of their concatenation.

    Args:
        products: Of shape `[..., N]` each.
        activation: One of ACTIVATIONS, or `""` for none.
        is_joined: Whether they are columns of one tensor.
    """
    if is_joined:
        products = [products[0] if len(products) == 1 else torch.cat(products, -1)]
    return [activated(activation, h) for h in products]
