"""The parameters of a call as kernels see them: checked once, and known again while they last."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fused_norm._memory import address, affine_is_float32, dense


class Parameters:
    """The LayerNorm's and the Linear layer's parameters, with what kernels ask of them.

    Attributes:
        outputs: N.
        features: K.
        dtype: Of the Linear parameters.
        device: Of all.
        ln_weight: Address of gamma, 0 for None.
        ln_bias: Address of beta, 0 for None.
        weight: Address of the weight.
        bias: Address of the Linear layer's bias, 0 for None.
        affine_is_float32: Whether there are LayerNorm parameters, in float32.
        way: The module that computes their calls, once it is chosen.
        folds: What the way on Hopper keeps, by stream.
    """

    __slots__ = (
        *("outputs", "features", "dtype", "device", "ln_weight", "ln_bias", "weight", "bias"),
        *("affine_is_float32", "way", "folds", "_ids", "_layout", "_references"),
    )

    def __init__(
        self,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
    ) -> None:
        tensors = (ln_weight, ln_bias, linear_weight, linear_bias)
        self._references: tuple[Any, ...] = dense(*tensors)
        self.outputs, self.features = linear_weight.shape
        self.dtype, self.device = linear_weight.dtype, linear_weight.device
        self.ln_weight, self.ln_bias, self.weight, self.bias = map(address, self._references)
        self.affine_is_float32 = affine_is_float32(ln_weight, ln_bias)
        self.way: Any = None
        self.folds: dict[int, Any] = {}
        self._ids = (id(ln_weight), id(ln_bias), id(linear_weight), id(linear_bias))
        self._layout: Any = None
        if all(a is b for a, b in zip(self._references, tensors, strict=True)):
            self._layout = _layout(*tensors)

    def tensors(self) -> tuple[Any, ...]:
        """Return gamma, beta, the weight and the bias in dense memory; None for none."""
        return tuple(r() if isinstance(r, weakref.ref) else r for r in self._references)

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
            and x.shape[-1] == self.features
            and x.is_contiguous()
            and not x.is_neg()
            and x.data_ptr() != 0
            and not torch._C._functorch.is_legacy_batchedtensor(x)
            and type(eps) is float
        )

    def keep(self) -> Parameters:
        """Have these parameters known until the first of their tensors goes, and return them.

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
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
) -> Parameters:
    """Return what kernels need to know of valid parameters, and know it from now on."""
    tensors = (ln_weight, ln_bias, linear_weight, linear_bias)
    return known(*tensors) or Parameters(*tensors).keep()


def known(ln_weight: Any, ln_bias: Any, linear_weight: Any, linear_bias: Any) -> Parameters | None:
    """Return what is known of these parameters, None where they are new.

    They are new as well after an assignment to their `data`, which may have brought another memory,
    dtype or shape. Their values may have changed.
    """
    tensors = (ln_weight, ln_bias, linear_weight, linear_bias)
    parameters = met(*tensors)
    if parameters is not None and parameters._layout == _layout(*tensors):
        return parameters
    return None


def met(ln_weight: Any, ln_bias: Any, linear_weight: Any, linear_bias: Any) -> Parameters | None:
    """Return what was known of these tensors, which may since have got other memory."""
    parameters = _kept.get(id(linear_weight))
    ids = (id(ln_weight), id(ln_bias), id(linear_weight), id(linear_bias))
    return parameters if parameters is not None and parameters._ids == ids else None


def forget_before_swap(linear_weight: Tensor) -> None:
    """Let go of what is known of a weight if PyTorch is set to swap the tensors of modules.

    It swaps only tensors that nobody refers to. Otherwise what is known stays, and with it the
    folds that captured graphs read.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        _kept.pop(id(linear_weight), None)


_kept: dict[int, Parameters] = {}


def _layout(
    ln_weight: Tensor | None, ln_bias: Tensor | None, weight: Tensor, bias: Tensor | None
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
        ln_weight is None or (ln_weight.is_contiguous() and ln_weight.data_ptr()),
        ln_bias is None or (ln_bias.is_contiguous() and ln_bias.data_ptr()),
        bias is None or (bias.is_contiguous() and bias.data_ptr()),
    )
