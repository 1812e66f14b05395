"""The parameters of a call as kernels see them: what follows from them alone is found out once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm.call.memory import address, dense
from fused_norm.call.record import Call, Part, Planned
from fused_norm.composition import GATED

# What a product is part of: the number of its norm, what is added to gamma, and the number of the
# activation in its epilogue.
Kind = tuple[int, float, int]
LAYER_NORM: Kind = (0, 0.0, 0)
# More than a model has; a server of prompts of any length may see more, and so may autocast, whose
# copies of weights lie anywhere.
_MOST_PLANS = 1024
_MOST_LAYOUTS = 4096
_ORDINARY = frozenset({Tensor, torch.nn.Parameter})


class Layout:
    """What follows from where parameters lie, their sizes and dtypes, whatever their values.

    Attributes:
        K: Features.
        N: Outputs of all; of a gate, half of the products.
        sizes: The outputs of each of several Linear layers that do not gate each other.
        dtype: Of the weight and the bias.
        device: Of all.
        norm_dtype: Of gamma and beta, None where there is neither.
        backends: What may compute their calls, in order, once that has been found out.
        launchers: Hopper's kernels and the contexts of their calls, by stream.
        plans: What forwards were planned, by what they depend on.
        half: A record with the parameters' half filled in.
        parts: Those of several Linear layers.
    """

    __slots__ = (
        *("K", "N", "sizes", "dtype", "device", "norm_dtype", "backends", "launchers", "plans"),
        *("half", "parts"),
    )

    def __init__(self, tensors: Sequence[Tensor | None], norm: Kind) -> None:
        gamma, beta, weight, _, *up = tensors
        assert weight is not None
        self.N, self.K = weight.shape
        self.sizes: tuple[int, ...] = ()
        is_gate = norm[2] >= GATED
        if is_gate and not up:
            self.N //= 2
        elif up and not is_gate:
            self.sizes = (self.N, *(w.shape[0] for w in up[::2] if w is not None))
            self.N = sum(self.sizes)
        self.dtype, self.device = weight.dtype, weight.device
        affine = gamma if gamma is not None else beta
        self.norm_dtype = None if affine is None else affine.dtype
        self.backends: tuple[Any, ...] | None = None
        self.launchers: dict[tuple[int, bool], Any] = {}
        self.plans: dict[Any, Planned] = {}
        self.half = half = Call()
        half.K, half.N = self.K, self.N
        half.gamma, half.beta, half.weight, half.bias = map(address, tensors[:4])
        half.normalization, half.weight_offset, _ = norm
        self.parts = (Part * len(self.sizes))()
        if self.sizes:
            linears = zip(tensors[2::2], tensors[3::2], strict=True)
            for part, size, (own, its_bias) in zip(self.parts, self.sizes, linears, strict=True):
                part.N, part.weight, part.bias = size, address(own), address(its_bias)
            half.part_count, half.parts = len(self.sizes), ctypes.addressof(self.parts)
        elif up:
            half.up, half.up_bias = map(address, up)
        elif is_gate:
            size = weight.element_size() * self.N
            half.up = half.weight + size * self.K
            half.up_bias = half.bias + size if half.bias else 0
        half.norm_is_float32 = self.norm_dtype is torch.float32 and self.dtype is not torch.float32


class Parameters:
    """The parameters of a norm and of the Linear layers after it, in dense memory.

    Attributes:
        tensors: Gamma, beta, the weight and the bias; after them, those of what the weight gates,
            if they are tensors of their own, or of the other Linear layers. None for none.
        norm: The number of the norm, what is added to gamma, and the number of the activation.
        layout: What follows from where they lie.
    """

    __slots__ = ("layout", "norm", "tensors")

    def __init__(self, tensors: tuple[Any, ...], norm: Kind, layout: Layout) -> None:
        self.tensors, self.norm, self.layout = tensors, norm, layout

    @property
    def is_gate(self) -> bool:
        """Whether the first half of the products gates the other."""
        return self.norm[2] >= GATED

    @property
    def products(self) -> int:
        """How many products a row has: twice the outputs before a gate."""
        return self.layout.N * (2 if self.is_gate else 1)

    @property
    def has_mean(self) -> bool:
        """Whether the norm takes the mean off: a LayerNorm does."""
        return self.norm[0] == 0

    def parts(self, outputs: Sequence[Tensor]) -> ctypes.Array[Part]:
        """Return the records of several Linear layers, with where their outputs go."""
        parts = type(self.layout.parts).from_buffer_copy(self.layout.parts)
        for part, y in zip(parts, outputs, strict=True):
            part.y = y.data_ptr()
        return parts

    def call(self, x: Tensor, eps: float) -> Call:
        """Return the record of a call on a dense x, with the parameters' half filled in."""
        call: Call = Call.from_buffer_copy(self.layout.half)
        call.M = x.numel() // self.layout.K
        call.x = x.data_ptr()
        call.eps = eps
        if x.dtype is not self.layout.dtype:
            # Autocast made the weight narrower than x, whose dtype gamma and beta have.
            call.narrow = 1 if self.layout.dtype is torch.bfloat16 else 2
            call.norm_is_float32 = 0
        return call

    def plan(self, key: Any, call: Call) -> Planned:
        """Keep the plan of a forward, and return it.

        Args:
            key: What the plan and the record depend on besides the parameters.
            call: The record, planned.
        """
        plans = self.layout.plans
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        planned = plans[key] = Planned(call)
        return planned

    def take(self, x: Any, eps: Any) -> bool:
        """Return whether the kernels serve an ordinary, dense input with these parameters.

        True is certain; False leaves it to be found out.
        """
        layout = self.layout
        return (
            type(x) is Tensor
            and x.dtype is layout.dtype
            and x.device == layout.device
            and x.layout is torch.strided
            and not x.is_nested
            and x.dim() > 0
            and x.shape[-1] == layout.K
            and x.is_contiguous()
            and not x.is_neg()
            and x.data_ptr() != 0
            and not torch._C._functorch.is_legacy_batchedtensor(x)
            and type(eps) is float
        )


def of(
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: Kind = LAYER_NORM,
    *up: Tensor | None,
) -> Parameters:
    """Return what kernels need to know of valid parameters.

    Args:
        gamma: Weight of the norm, or None.
        beta: Its bias, or None.
        weight: Of the Linear layer, or of the first of several.
        bias: Its bias, or None.
        norm: What the product is part of.
        up: Weight and bias of what the first one gates, or of each further Linear layer.
    """
    tensors = dense(gamma, beta, weight, bias, *up)
    key = _key(tensors, norm)
    layout = None if key is None else _layouts.get(key)
    if layout is None:
        layout = Layout(tensors, norm)
        if key is not None:
            if len(_layouts) >= _MOST_LAYOUTS:
                _layouts.clear()
            _layouts[key] = layout
    return Parameters(tensors, norm, layout)


def known(
    gamma: Any, beta: Any, weight: Any, bias: Any, norm: Kind = LAYER_NORM
) -> Parameters | None:
    """Return what `of` does where valid parameters lay so before, None where that is to be seen."""
    tensors = (gamma, beta, weight, bias)
    key = _key(tensors, norm)
    layout = None if key is None else _layouts.get(key)
    return None if layout is None else Parameters(tensors, norm, layout)


def _key(tensors: tuple[Any, ...], norm: Kind) -> tuple[Any, ...] | None:
    """Return everything that a layout depends on; None for what is not ordinary and dense."""
    key: list[Any] = [norm]
    for t in tensors:
        if t is None:
            key.append(None)
            continue
        if type(t) not in _ORDINARY or t.layout is not torch.strided or t.is_nested:
            return None
        if not t.is_contiguous():
            return None
        # The keys tell a tensor whose values are not those in memory.
        keys = torch._C._dispatch_keys(t).raw_repr()
        key += (t.data_ptr(), t.shape, t.dtype, t.get_device(), keys)
    return tuple(key)


_layouts: dict[Any, Layout] = {}
