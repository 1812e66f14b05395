"""Who computes a call: each backend accepts it or declines it, in order of preference.

A backend is a module with three functions:

    accepts(x, parameters) -> bool
        Whether its kernels serve the dtypes and the device: asked once for the parameters.
    forward(x, parameters, eps, statistics) -> (y, mean, rstd), or None to decline
        y of shape [..., N], and mean and rstd of shape [...], None if not asked for.
    backward(grad_output, x, parameters, mean, rstd, eps, wanted, main_grad) -> gradients, or None
        Those of x, gamma, beta, the weight and the bias, None for each that is not wanted. Where
        there is a main_grad [N, K] in the type of sums, the weight's gradient is added to it
        instead.

x is dense and not empty, except for the last one, PyTorch's own ops, which declines nothing. No
backend calls another. What the C++ node runs itself, it learns from `compiled`.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from fused_norm.backends import cpu, gpu, pytorch, sm90
from fused_norm.call.parameters import Parameters

BACKENDS: tuple[ModuleType, ...] = (sm90, gpu, cpu, pytorch)


def of(x: Tensor, parameters: Parameters) -> tuple[ModuleType, ...]:
    """Return the backends that accept a call, the preferred one first."""
    if not x.numel() or not parameters.layout.N:
        return (pytorch,)
    if x.dtype is not parameters.layout.dtype:
        return _accepting(x, parameters)
    if parameters.layout.backends is None:
        parameters.layout.backends = _accepting(x, parameters)
    return parameters.layout.backends


def _accepting(x: Tensor, parameters: Parameters) -> tuple[ModuleType, ...]:
    return tuple(backend for backend in BACKENDS if backend.accepts(x, parameters))


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and rstd from the first backend that does not decline.

    The mean is None for a norm that has none.
    """
    for backend in of(x, parameters):
        result: tuple[Tensor, Tensor, Tensor] | None
        result = backend.forward(x, parameters, eps, statistics)
        if result is not None:
            return result
    raise AssertionError("the last backend declines nothing")


def backward(
    grad_output: Tensor,
    x: Tensor,
    parameters: Parameters,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
    wanted: list[bool],
    main_grad: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the five gradients from the first backend that does not decline."""
    for backend in of(x, parameters):
        gradients: list[Tensor | None] | None
        gradients = backend.backward(grad_output, x, parameters, mean, rstd, eps, wanted, main_grad)
        if gradients is not None:
            return gradients
    raise AssertionError("the last backend declines nothing")
