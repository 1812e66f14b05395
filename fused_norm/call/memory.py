"""Tensors as kernels see them: addresses, dense memory, results and workspaces to write to."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fused_norm.call.parameters import Parameters

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean and rstd, and of every sum, for an input dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def own_eps(dtype: torch.dtype) -> float:
    """Return what PyTorch adds to the mean square of an RMSNorm whose eps is None.

    It is that of the dtype of sums, on CPUs and GPUs alike, in every version that is supported.
    """
    return torch.finfo(statistics_dtype(dtype)).eps


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def dense(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors, or their values, in contiguous memory; None stays None."""
    for tensor in tensors:
        if tensor is not None and (
            not tensor.is_contiguous() or tensor.is_neg() or tensor._is_zerotensor()
        ):
            return tuple(None if t is None else _in_memory(t) for t in tensors)
    return tensors


def _in_memory(tensor: Tensor) -> Tensor:
    # Autograd's zeros take no memory until they are cloned.
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg().contiguous()


def aligned(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return dense tensors, on a GPU copies of those that loads of 16 bytes cannot read."""
    return tuple(
        t.clone() if t is not None and t.is_cuda and t.data_ptr() % 16 else t for t in tensors
    )


def laid_as_sum(tensor: Tensor, *summands: Tensor | None) -> Tensor:
    """Return a dense tensor, laid out as PyTorch lays out the sum of some tensors of its shape."""
    given = [v for v in summands if v is not None]
    if all(v.is_contiguous() for v in given):
        return tensor
    # Without values, an op gives a layout alone.
    bare = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in given]
    total = functools.reduce(torch.add, bare)
    if tensor.stride() == total.stride():
        return tensor
    laid = torch.empty_strided(
        total.shape, total.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return laid.copy_(tensor)


def lies_transposed(weight: Tensor) -> bool:
    """Return whether a weight lies column by column, as that of a Conv1D seen as a Linear layer's.

    Its gradient does, too: autograd would copy it.
    """
    return not weight.is_contiguous() and weight.t().is_contiguous()


def workspace(size: int, device: torch.device) -> Tensor:
    """Return scratch memory of a number of bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def empty_statistics(x: Tensor, has_mean: bool = True) -> tuple[Tensor | None, Tensor]:
    """Return memory for the mean and rstd of each row; None for the mean of a norm without."""
    rstd = _empty(x, x.shape[:-1], dtype=statistics_dtype(x.dtype))
    return torch.empty_like(rstd) if has_mean else None, rstd


def _empty(like: Tensor, shape: torch.Size, **options: Any) -> Tensor:
    # Sizes one by one: PyTorch takes half as long again to return a tuple of them.
    return like.new_empty(*shape, **options) if shape else like.new_empty(shape, **options)


def empty_gradients(x: Tensor, parameters: Parameters, wanted: list[bool]) -> list[Tensor | None]:
    """Return memory for the five gradients, None for each that is not wanted.

    Args:
        x: Input of shape `[..., K]`.
        parameters: The call's.
        wanted: Whether the gradients of x, gamma, beta, the weight and the bias are wanted.
    """
    K, N = parameters.layout.K, parameters.layout.N
    norm, linear = parameters.layout.norm_dtype or x.dtype, parameters.layout.dtype
    dx, dgamma, dbeta, dweight, dbias = wanted
    return [
        _empty(x, x.shape) if dx else None,
        x.new_empty(K, dtype=norm) if dgamma else None,
        x.new_empty(K, dtype=norm) if dbeta else None,
        x.new_empty(N, K, dtype=linear) if dweight else None,
        x.new_empty(N, dtype=linear) if dbias else None,
    ]
