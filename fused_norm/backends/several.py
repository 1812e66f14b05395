"""Hopper: several Linear layers on the same rows, q, k and v or gate and up, in one launch.

    y_i = z W_i^T + b_i        the columns of all run on from one weight and output to the next
    dz  = sum_i dy_i W_i       so do the sums, where PyTorch would add to dz in memory each time;
                               the pass over its rows may run in the same kernel

No weight is copied: each has tensor maps of its own. Where the plans of
op/norm_linear/sm90/several.mojo decline, these return None, and PyTorch's products are faster. The
forward on folded weights is part of sm90.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_norm.backends.sm90_kernels import extension, is_alone, is_hopper, launcher
from fused_norm.call.memory import LOW_PRECISION, address, workspace
from fused_norm.call.record import DECLINED, MOST_PARTS, WANTED, Call, Part


def products(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm: int,
    is_joined: bool,
) -> list[Tensor] | None:
    """Return z weight^T + bias for each weight, or None.

    Args:
        z: Dense rows `[..., K]`.
        weights: Each `[N, K]`.
        biases: One for each weight, or None.
        norm: The number of the norm whose extension is at hand.
        is_joined: Whether to return all products side by side in one tensor.
    """
    if not _serves(z, weights):
        return None
    K = z.shape[-1]
    kernels, call, parts = _record(z, z.numel() // K, K, weights, norm)
    call.z = z.data_ptr()
    for part, bias in zip(parts, biases, strict=True):
        part.bias = address(bias)
    sizes = [weight.shape[0] for weight in weights]
    call.pitch = sum(sizes) if is_joined else 0
    kernels.plan_products(ctypes.addressof(call))
    if call.way == DECLINED:
        return None
    if any(bias is not None for bias in biases):
        # The kernel adds one everywhere or nowhere.
        biases = [z.new_zeros(n) if b is None else b for n, b in zip(sizes, biases, strict=True)]
        for part, bias in zip(parts, biases, strict=True):
            part.bias = address(bias)
    if is_joined:
        outputs = [z.new_empty(*z.shape[:-1], sum(sizes))]
        places = outputs[0].view(-1, sum(sizes)).split(sizes, -1)
    else:
        outputs = [z.new_empty(*z.shape[:-1], n) for n in sizes]
        places = tuple(outputs)
    for part, place in zip(parts, places, strict=True):
        part.y = place.data_ptr()
    kernels.products(ctypes.addressof(call))
    return outputs


def input_gradients(
    dys: Sequence[Tensor | None], weights: Sequence[Tensor], norm: int
) -> Tensor | None:
    """Return the sum of dy weight over all pairs, or None.

    Args:
        dys: Each `[M, N]` of one dtype, dense or side by side in one tensor; None for zeros.
        weights: Each `[N, K]`.
        norm: The number of the norm whose extension is at hand.
    """
    found = _gradients(dys, weights, norm)
    if found is None:
        return None
    kernels, call, _parts, dy = found
    kernels.plan_input_gradients(ctypes.addressof(call))
    if call.way == DECLINED:
        return None
    dz = dy.new_empty(call.M, call.K)
    call.dz = dz.data_ptr()
    kernels.input_gradients(ctypes.addressof(call))
    return dz


class PassedRows:
    """The kernel that adds up dy weight, and passes over the rows of that, where it is faster."""

    def __init__(self, kernels: ModuleType, call: Call, held: Any) -> None:
        self._kernels, self._call, self._held = kernels, call, held

    @staticmethod
    def planned(
        dys: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        x: Tensor,
        norm: int,
        dsum: Tensor | None = None,
    ) -> PassedRows | None:
        """Return it, or None where a pass of its own over the rows is faster.

        Args:
            dys: As for `input_gradients`.
            weights: Each `[N, K]`.
            x: Dense `[..., K]`, what was normalized.
            norm: The number of the norm.
            dsum: Dense, added to the gradient of x.
        """
        found = _gradients(dys, weights, norm)
        if found is None or found[3].dtype is not x.dtype:
            return None
        kernels, call, parts, dy = found
        call.x, call.dx, call.dsum = x.data_ptr(), WANTED, address(dsum)
        kernels.plan_passed_rows(ctypes.addressof(call))
        return None if call.way == DECLINED else PassedRows(kernels, call, (parts, dy, dsum))

    def run(self, norm: Call, results: dict[str, Tensor]) -> Tensor:
        """Return the normalized rows `[M, K]`, and write the gradients.

        Args:
            norm: A record with the norm's half filled in, mean and rstd included.
            results: By their operands' names, receive the gradients of x, gamma and beta.
        """
        call, dy = self._call, self._held[1]
        for name in ("mean", "rstd", "gamma", "beta", "weight_offset", "norm_is_float32"):
            setattr(call, name, getattr(norm, name))
        for name, gradient in results.items():
            setattr(call, f"d{name}", gradient.data_ptr())
        z: Tensor = dy.new_empty(call.M, call.K)
        scratch = workspace(call.workspace_bytes, dy.device)
        call.dz, call.workspace = z.data_ptr(), scratch.data_ptr()
        self._kernels.passed_rows(ctypes.addressof(call))
        return z


def _gradients(
    dys: Sequence[Tensor | None], weights: Sequence[Tensor], norm: int
) -> tuple[ModuleType, Call, ctypes.Array[Part], Tensor] | None:
    """Return the record of dys that are there, and the first of them; None without a kernel."""
    pairs = [(dy, w) for dy, w in zip(dys, weights, strict=True) if dy is not None]
    if not pairs or not _serves(pairs[0][0], [w for _, w in pairs]):
        return None
    first = pairs[0][0]
    are_dense = all(dy.is_contiguous() for dy, _ in pairs)
    pitch = 0 if are_dense else first.stride(0)
    if not are_dense and any(dy.stride() != (pitch, 1) for dy, _ in pairs):
        return None
    K = weights[0].shape[1]
    kernels, call, parts = _record(first, first.shape[0], K, [w for _, w in pairs], norm)
    call.pitch = pitch
    for part, (dy, _) in zip(parts, pairs, strict=True):
        part.dy = dy.data_ptr()
    return kernels, call, parts, first


def _serves(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether there are kernels for rows of a dtype and weights that lie as these."""
    return (
        x.is_cuda
        and x.dtype in LOW_PRECISION
        and is_hopper(x.device.index)
        and 1 < len(weights) <= MOST_PARTS
        and all(w.dtype is x.dtype and w.is_contiguous() for w in weights)
    )


def _record(
    x: Tensor, M: int, K: int, weights: Sequence[Tensor], norm: int
) -> tuple[ModuleType, Call, ctypes.Array[Part]]:
    """Return the kernels, a call on x's stream, and its parts, which have to live as long."""
    device = x.device.index
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernels, context = launcher(extension(x.dtype, norm), device, stream, is_alone())
    parts = (Part * len(weights))()
    call = Call(M=M, K=K, context=context, in_graph=torch.cuda.is_current_stream_capturing())
    for part, weight in zip(parts, weights, strict=True):
        part.N, part.weight = weight.shape[0], weight.data_ptr()
        call.N += part.N
    call.parts, call.part_count = ctypes.addressof(parts), len(weights)
    return kernels, call, parts
