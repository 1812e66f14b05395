"""The pieces that members are composed of: PyTorch's, none at all, and other projects'."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import EPS


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight), total


def _modulate(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return z * (1 + scale) + shift


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def _turn(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Return normalized heads with their rotary embedding, as transformers writes it."""
    z = x if weight is None else _rms_norm(x, weight)
    first, second = z[..., : z.shape[-1] // 2], z[..., z.shape[-1] // 2 :]
    turned = torch.cat((-second, first), -1)
    return z * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return x + gate * y


class Parts(NamedTuple):
    """What stands around the products of a member; by default as users of PyTorch write it.

    Attributes:
        rms_norm: Of x and its weight.
        layer_norm: Of x, weight and bias.
        add_rms_norm: Of x, what is added to it, and the weight; returns the sum as well.
        modulate: Of normalized rows, scale and shift.
        gelu: Of a product.
        swiglu: Of a product twice as wide, the gate first.
        add: Of x and what a block returns for it.
        add_gated: Of x, that, and a factor of it.
        linear: Of x, a weight and perhaps a bias.
        turn: Of heads of queries or keys, the weight of their norm or None, cosines and sines.
    """

    rms_norm: Callable[..., Tensor] = _rms_norm
    layer_norm: Callable[..., Tensor] = _layer_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = _add_rms_norm
    modulate: Callable[..., Tensor] = _modulate
    gelu: Callable[[Tensor], Tensor] = F.gelu
    swiglu: Callable[[Tensor], Tensor] = _swiglu
    add: Callable[[Tensor, Tensor], Tensor] = torch.add
    add_gated: Callable[[Tensor, Tensor, Tensor], Tensor] = _add_gated
    linear: Callable[..., Tensor] = F.linear
    turn: Callable[..., Tensor] = _turn


def _nothing(x: Tensor, *_: Tensor | None) -> Tensor:
    return x


class _Half(torch.autograd.Function):
    """One half of a gate's product, at no cost in either direction.

    Its gradient is the product itself: numbers as dense as real ones. With zeros for the other
    half, as PyTorch has them, products take less power, and a GPU at its limit less time.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        """Return a view `[..., N]` of h `[..., 2N]`."""
        ctx.save_for_backward(h)
        return h[..., : h.shape[-1] // 2]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        """Return what has the shape of the gradient."""
        h: Tensor = ctx.saved_tensors[0]
        return h


TORCH = Parts()
# The floor: products and attention.
BARE = Parts(
    rms_norm=_nothing,
    layer_norm=_nothing,
    add_rms_norm=lambda x, residual, weight: (x, residual),
    modulate=_nothing,
    turn=_nothing,
    gelu=_nothing,
    swiglu=_Half.apply,
    add=lambda x, y: y,
    add_gated=lambda x, y, gate: y,
)


def liger() -> Parts:
    """Return Liger's norms and gate.

    Raises:
        ImportError: If it is not installed, or lacks one of them.
    """
    rms_norm = _of("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    layer_norm = _of("liger_kernel.ops.layer_norm", "LigerLayerNormFunction")
    add_rms_norm = _of("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    swiglu = _of("liger_kernel.ops.swiglu", "LigerFusedGateUpSiLUMulFunction")
    return Parts(
        rms_norm=lambda x, weight: rms_norm.apply(x, weight, EPS),
        layer_norm=lambda x, weight, bias: layer_norm.apply(x, weight, bias, EPS),
        add_rms_norm=lambda x, residual, weight: add_rms_norm.apply(x, residual, weight, EPS),
        swiglu=swiglu.apply,
    )


def quack() -> Parts:
    """Return QuACK's RMSNorms.

    Raises:
        ImportError: If it is not installed.
    """
    rms_norm = _of("quack.rmsnorm", "rmsnorm")
    return Parts(
        rms_norm=lambda x, weight: rms_norm(x, weight, eps=EPS),
        add_rms_norm=lambda x, residual, weight: rms_norm(
            x, weight, residual=residual, eps=EPS, prenorm=True
        ),
    )


def _of(module: str, name: str) -> Any:
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ImportError(f"{module} has no {name}")
    return found
