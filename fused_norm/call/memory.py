"""Tensors as kernels need them: addresses, dense memory, and buffers for results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
# The types of operands whose values are in their memory; None for an absent one.
ORDINARY = frozenset({Tensor, torch.nn.Parameter, type(None)})


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean and rstd, and of every sum, for an input dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def own_eps(dtype: torch.dtype) -> float:
    """Return the eps that PyTorch adds in an RMSNorm whose eps is None.

    It is that of the dtype of sums, on CPUs and GPUs alike, in every supported version.
    """
    return torch.finfo(statistics_dtype(dtype)).eps


def dense(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors, or copies, in contiguous memory with their values; None stays None."""
    for tensor in tensors:
        if tensor is not None and (
            not tensor.is_contiguous() or tensor.is_neg() or tensor._is_zerotensor()
        ):
            return tuple(None if t is None else _in_memory(t) for t in tensors)
    return tensors


def _in_memory(tensor: Tensor) -> Tensor:
    # Autograd's zero tensors take no memory until they are cloned.
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg().contiguous()


def in_memory(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return tensors whose values are those in their memory, in any layout.

    PyTorch's dispatcher does this, but not for lists with optional tensors.
    """
    if any(t is not None and (t.is_neg() or t._is_zerotensor()) for t in tensors):
        return [t if t is None else _in_memory(t) for t in tensors]
    return tensors


def laid_as_sum(tensor: Tensor, *summands: Tensor | None) -> Tensor:
    """Return a dense tensor in the layout of PyTorch's sum of some tensors of its shape."""
    given = [v for v in summands if v is not None]
    if all(v.is_contiguous() for v in given):
        return tensor
    # Run on tensors without values, an op computes only a layout.
    bare = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in given]
    total = functools.reduce(torch.add, bare)
    if tensor.stride() == total.stride():
        return tensor
    laid = torch.empty_strided(
        total.shape, total.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return laid.copy_(tensor)


def is_transposed(weight: Tensor) -> bool:
    """Return whether a weight is stored by columns, like a Conv1D's used as a Linear layer's.

    Its gradient is stored the same way: autograd would copy it otherwise.
    """
    return not weight.is_contiguous() and weight.t().is_contiguous()
