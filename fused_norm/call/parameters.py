"""The parameters of a call as kernels see them: checked once, and recognized while they last."""

from __future__ import annotations

import ctypes
import weakref
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
# More shapes than a model has; a server of prompts of any length may see more.
_MOST_PLANS = 1024


class Parameters:
    """The parameters of a norm and of the Linear layers after it, with what kernels ask of them.

    Attributes:
        K: Features.
        N: Outputs of all; of a gate, half of the products.
        sizes: The outputs of each of several Linear layers that do not gate each other.
        dtype: Of the weight and the bias.
        device: Of all.
        norm_dtype: Of gamma and beta, None where there is neither.
        backends: What may compute their calls, in order, once that has been found out.
        folds: What Hopper's backend keeps, by stream.
        launchers: Its kernels and the contexts of their calls, by stream.
        plans: What forwards were planned, by what they depend on.
        norm: The number of the norm, what is added to gamma, and the number of the activation.
    """

    __slots__ = (
        *("K", "N", "sizes", "dtype", "device", "norm_dtype", "backends", "folds"),
        *("launchers", "plans", "norm"),
        *("_half", "_ids", "_layout", "_parts", "_references"),
    )

    def __init__(
        self,
        gamma: Tensor | None,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: Kind = LAYER_NORM,
        *up: Tensor | None,
    ) -> None:
        tensors = (gamma, beta, weight, bias, *up)
        self.norm = norm
        self._references: tuple[Any, ...] = dense(*tensors)
        self.N, self.K = weight.shape
        self.sizes: tuple[int, ...] = ()
        if self.is_gate and not up:
            self.N //= 2
        elif up and not self.is_gate:
            self.sizes = (self.N, *(w.shape[0] for w in up[::2] if w is not None))
            self.N = sum(self.sizes)
        self.dtype, self.device = weight.dtype, weight.device
        affine = gamma if gamma is not None else beta
        self.norm_dtype = None if affine is None else affine.dtype
        self.backends: tuple[Any, ...] | None = None
        self.folds: dict[int, Any] = {}
        self.launchers: dict[tuple[int, bool], Any] = {}
        self.plans: dict[Any, Planned] = {}
        self._half = half = Call()
        half.K, half.N = self.K, self.N
        half.gamma, half.beta, half.weight, half.bias = map(address, self._references[:4])
        half.normalization, half.weight_offset, _ = norm
        self._parts = (Part * len(self.sizes))()
        if self.sizes:
            linears = zip(self._references[2::2], self._references[3::2], strict=True)
            for part, size, (own, its_bias) in zip(self._parts, self.sizes, linears, strict=True):
                part.N, part.weight, part.bias = size, address(own), address(its_bias)
            half.part_count, half.parts = len(self.sizes), ctypes.addressof(self._parts)
        elif up:
            half.up, half.up_bias = map(address, self._references[4:])
        elif self.is_gate:
            size = weight.element_size() * self.N
            half.up = half.weight + size * self.K
            half.up_bias = half.bias + size if half.bias else 0
        half.norm_is_float32 = self.norm_dtype is torch.float32 and self.dtype is not torch.float32
        self._ids = tuple(map(id, tensors))
        self._layout: Any = None
        if all(a is b for a, b in zip(self._references, tensors, strict=True)):
            self._layout = _layout(gamma, beta, weight, bias, *up)

    @property
    def is_gate(self) -> bool:
        """Whether the first half of the products gates the other."""
        return self.norm[2] >= GATED

    @property
    def products(self) -> int:
        """How many products a row has: twice the outputs before a gate."""
        return self.N * (2 if self.is_gate else 1)

    @property
    def has_mean(self) -> bool:
        """Whether the norm takes the mean off: a LayerNorm does."""
        return self.norm[0] == 0

    def tensors(self) -> tuple[Any, ...]:
        """Return gamma, beta, the weight and the bias in dense memory; None for none.

        After them, those of what the weight gates, if they are tensors of their own, or of the
        other Linear layers.
        """
        return tuple(r() if isinstance(r, weakref.ref) else r for r in self._references)

    def parts(self, outputs: Sequence[Tensor]) -> ctypes.Array[Part]:
        """Return the records of several Linear layers, with where their outputs go."""
        parts = type(self._parts).from_buffer_copy(self._parts)
        for part, y in zip(parts, outputs, strict=True):
            part.y = y.data_ptr()
        return parts

    def call(self, x: Tensor, eps: float) -> Call:
        """Return the record of a call on a dense x, with the parameters' half filled in."""
        call: Call = Call.from_buffer_copy(self._half)
        call.M = x.numel() // self.K
        call.x = x.data_ptr()
        call.eps = eps
        if x.dtype is not self.dtype:
            # Autocast made the weight narrower than x, whose dtype gamma and beta have.
            call.narrow = 1 if self.dtype is torch.bfloat16 else 2
            call.norm_is_float32 = 0
        return call

    def plan(self, key: Any, call: Call) -> Planned:
        """Keep the plan of a forward, and return it.

        Args:
            key: What the plan and the record depend on besides the parameters.
            call: The record, planned.
        """
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        planned = self.plans[key] = Planned(call)
        return planned

    def take(self, x: Any, eps: Any) -> bool:
        """Return whether the kernels serve an ordinary, dense input with these parameters.

        True is certain; False leaves it to be found out.
        """
        return (
            type(x) is Tensor
            and x.dtype is self.dtype
            and x.device == self.device
            and x.layout is torch.strided
            and not x.is_nested
            and x.dim() > 0
            and x.shape[-1] == self.K
            and x.is_contiguous()
            and not x.is_neg()
            and x.data_ptr() != 0
            and not torch._C._functorch.is_legacy_batchedtensor(x)
            and type(eps) is float
        )

    def keep(self) -> Parameters:
        """Keep these parameters known until the first of their tensors is freed, and return them.

        Copies in dense memory are not kept: nothing would tell when they are out of date.
        """
        if self._layout is not None:
            key, own = self._ids[2], id(self)

            def forget(_: Any) -> None:
                if id(_kept.get(key)) == own:
                    _kept.pop(key, None)

            self._references = tuple(
                None if t is None else weakref.ref(t, forget) for t in self._references
            )
            _kept[key] = self
        return self


def of(
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: Kind = LAYER_NORM,
    *up: Tensor | None,
) -> Parameters:
    """Return what kernels need to know of valid parameters, and know it from now on.

    Args:
        gamma: Weight of the norm, or None.
        beta: Its bias, or None.
        weight: Of the Linear layer, or of the first of several.
        bias: Its bias, or None.
        norm: What the product is part of.
        up: Weight and bias of what the first one gates, or of each further Linear layer.
    """
    tensors = (gamma, beta, weight, bias)
    return known(*tensors, norm, *up) or Parameters(*tensors, norm, *up).keep()


def of_saved(
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    norm: Kind = LAYER_NORM,
) -> Parameters:
    """Return the same for a backward, which needs neither the bias nor an activation."""
    kept = _kept.get(id(weight))
    ids = (id(gamma), id(beta), id(weight))
    is_same = kept is not None and kept._ids[:3] == ids and kept.norm[:2] == norm[:2]
    if kept is not None and is_same and not kept.is_gate and not kept.sizes:
        layout = _layout(gamma, beta, weight, None)
        if kept._layout is not None and kept._layout[:-1] == layout[:-1]:
            return kept
    return Parameters(gamma, beta, weight, None, norm)


def known(
    gamma: Any, beta: Any, weight: Any, bias: Any, norm: Kind = LAYER_NORM, *up: Any
) -> Parameters | None:
    """Return what is known of these parameters, None where they are new.

    They are new as well after an assignment to their `data`, which may have brought other memory,
    another dtype or shape. Their values may have changed.
    """
    tensors = (gamma, beta, weight, bias)
    parameters = met(*tensors, norm, *up)
    if parameters is not None and parameters._layout == _layout(*tensors, *up):
        return parameters
    return None


def met(
    gamma: Any, beta: Any, weight: Any, bias: Any, norm: Kind = LAYER_NORM, *up: Any
) -> Parameters | None:
    """Return what was known of these tensors, which may have been given other memory since."""
    parameters = _kept.get(id(weight))
    ids = (id(gamma), id(beta), id(weight), id(bias), *map(id, up))
    if parameters is None or parameters._ids != ids:
        return None
    return parameters if parameters.norm == norm else None


def forget_before_swap(weight: Tensor) -> None:
    """Forget what is known of a weight if PyTorch is set to swap the tensors of modules.

    It swaps only tensors that nobody refers to. Otherwise what is known stays, and with it the
    folds that captured graphs read.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        _kept.pop(id(weight), None)


_kept: dict[int, Parameters] = {}


def _layout(
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *up: Tensor | None,
) -> tuple[Any, ...]:
    """Return what an assignment to the `data` of a parameter changes, in few and fast calls.

    The shape of the weight says those of the vectors: where one disagrees, PyTorch raises an error
    that is missed here. Its memory still holds as many elements as before.
    """
    return (
        weight.shape,
        weight.dtype,
        weight.data_ptr(),
        weight.is_contiguous(),
        gamma is None or (gamma.is_contiguous() and gamma.data_ptr()),
        beta is None or (beta.is_contiguous() and beta.data_ptr()),
        bias is None or (bias.is_contiguous() and bias.data_ptr()),
        *(v is None or (v.is_contiguous() and (v.data_ptr(), v.shape[0])) for v in up),
    )
