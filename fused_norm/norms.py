"""The norms: all that the library knows of each, in a table.

Functions, modules, models, MAX graphs, builds and the record of a call read it. The kernels are in
op/norms/, and `function` computes a norm with PyTorch's ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Normalization(NamedTuple):
    """A norm over the last dimension.

    Attributes:
        number: Its number in the record of a call.
        has_mean: Whether its statistics are mean and rstd of each row, not rstd alone.
        function: Returns the norm of rows `[..., K]` from the rows, `(K,)`, gamma, beta and eps.
        statistics: Returns mean, or None, and rstd of rows from the rows and eps.
        module: PyTorch's module, whose name is the norm's in our modules.
        has_bias: Whether that module has a beta.
        eps: That module's default eps: None if it depends on the dtype.
        targets: PyTorch's functions that compute it in a graph.
        arguments: The names of their arguments.
    """

    number: int
    has_mean: bool
    function: Callable[[Tensor, Sequence[int], Tensor | None, Tensor | None, Any], Tensor]
    statistics: Callable[[Tensor, float], tuple[Tensor | None, Tensor]]
    module: type[nn.Module]
    has_bias: bool
    eps: float | None
    targets: tuple[Any, ...]
    arguments: str


def _layer_norm(
    rows: Tensor, features: Sequence[int], gamma: Tensor | None, beta: Tensor | None, eps: Any
) -> Tensor:
    if gamma is None and isinstance(beta, Tensor) and beta.requires_grad and beta.shape == features:
        # PyTorch's second derivative of a bias without a weight drops a term.
        gamma = torch.ones_like(beta)
    return F.layer_norm(rows, features, gamma, beta, eps)


def _rms_norm(
    rows: Tensor, features: Sequence[int], gamma: Tensor | None, beta: Tensor | None, eps: Any
) -> Tensor:
    z = F.rms_norm(rows, features, gamma, eps)
    return z if beta is None else z + beta


def _mean_and_rstd(rows: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
    variance, mean = torch.var_mean(rows, -1, correction=0)
    return mean, torch.rsqrt(variance + eps)


def _rstd(rows: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
    return None, torch.rsqrt(rows.square().mean(-1) + eps)


NORMS: dict[str, Normalization] = {
    "layer_norm": Normalization(
        number=0,
        has_mean=True,
        function=_layer_norm,
        statistics=_mean_and_rstd,
        module=nn.LayerNorm,
        has_bias=True,
        eps=1e-5,
        targets=(F.layer_norm, torch.layer_norm),
        arguments="input normalized_shape weight bias eps",
    ),
    "rms_norm": Normalization(
        number=1,
        has_mean=False,
        function=_rms_norm,
        statistics=_rstd,
        module=nn.RMSNorm,
        has_bias=False,
        eps=None,
        targets=(F.rms_norm, torch.rms_norm),
        arguments="input normalized_shape weight eps",
    ),
}
NORMALIZATIONS = tuple(NORMS)
"""Their names, in the order of their numbers."""
LAYER_NORM, RMS_NORM = NORMALIZATIONS[:2]
_NAMES = {norm.number: name for name, norm in NORMS.items()}


def by_number(number: int) -> str:
    """Return the name of a norm by its number in the record."""
    return _NAMES[number]


def require_norm(name: Any) -> Normalization:
    """Return a norm by its name.

    Raises:
        ValueError: If there is none.
    """
    try:
        return NORMS[name]
    except (KeyError, TypeError):
        message = f"normalization must be one of {NORMALIZATIONS}, got {name!r}"
        raise ValueError(message) from None
