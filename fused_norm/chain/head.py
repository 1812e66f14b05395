"""The head in chunks of rows, so that logits exist for one chunk at a time.

A chunk stores the exponentials `E` of its logits, with the label's entry changed so that `E` times
a factor for each row is the gradient of the logits. Both gradients are then plain products:

    dx = factor * (E W)      dW += E^T (factor * x)      db += E^T factor

Hopper's product writes `E` in bfloat16 without ever rounding a logit (`head_sm90.py`); elsewhere
PyTorch's ops compute it from the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_norm.call.memory import LOW_PRECISION, statistics_dtype
from fused_norm.chain import head_sm90, head_tiles
from fused_norm.chain.head_rows import Chunk, Composed, Rows
from fused_norm.chain.head_shards_sm90 import ShardedChunks
from fused_norm.cross_entropy import Head, Loss, denominator, reduced, row_scales, token_weights

# Rows of a chunk. On an H100, 4096 are within 4 % of all rows at once; a CPU's caches hold fewer.
GPU_ROWS, CPU_ROWS = 4096, 1024
# 16-bit elements in a load of 16 bytes.
_ALIGNED = 8
# Columns that are widened at once to be summed with weights.
_WIDENED = 8192
# On a CPU, there are at least this many chunks of at least this many rows, if M allows.
_LEAST_CHUNKS, _LEAST_ROWS = 8, 128
# Each chunk's product packs the whole weight: 128 rows take 1.15 of the time of longer chunks (Zen
# 5). Up to this many logits (64 MiB), chunks have twice as many rows: they save little memory.
_FEW_LOGITS = 1 << 24


class Found(NamedTuple):
    """Results of a call.

    Attributes:
        loss: The reduced loss.
        logsumexp: One for each row, in the shape of the target.
        gradients: Of x, the weight and the bias, None if not wanted.
    """

    loss: Tensor
    logsumexp: Tensor
    gradients: list[Tensor | None]


def rows_of_chunk(M: int, V: int, chunk_rows: int, is_cpu: bool) -> int:
    """Return how many rows a chunk has, so that all chunks have about the same size.

    Args:
        M: All rows.
        V: Size of the vocabulary.
        chunk_rows: The user's limit, 0 for the device's default.
        is_cpu: Whether it runs on a CPU.
    """
    most = chunk_rows or GPU_ROWS
    if is_cpu and not chunk_rows:
        least = _LEAST_ROWS if M * V > _FEW_LOGITS else 2 * _LEAST_ROWS
        most = min(CPU_ROWS, max(-(-M // _LEAST_CHUNKS), least))
    chunks = max(-(-M // most), 1)
    return max(-(-M // chunks), 1)


def compute(
    t: Head,
    loss: Loss,
    wanted: list[bool],
    grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Found:
    """Compute the loss, and the gradients that are wanted.

    Args:
        t: The tensors.
        loss: What to compute.
        wanted: Which gradients: of x, the weight, the bias.
        grads: Gradients of the loss, None for 1, and of the logsumexps, None for 0.

    Raises:
        IndexError: For labels out of range; on a GPU, a kernel asserts the range instead.
    """
    M, K = t.target.numel(), t.weight.shape[1]
    x, wide = t.x.reshape(M, K), statistics_dtype(t.x.dtype)
    flat = t._replace(x=x, target=t.target.reshape(M))
    has_kernels = head_sm90.serves(flat, loss)
    if not has_kernels:
        check_labels(t, loss)
    most = loss.chunk_rows
    if has_kernels and not loss.group and not any(wanted):
        most = most or head_sm90.rows_of_sums(len(t.weight))
    # Processes that share the vocabulary need the same chunks, whatever the size of their shards.
    size = rows_of_chunk(M, loss.classes or len(t.weight), most, x.is_cpu)
    has_own_dx = has_kernels and wanted[0] and head_sm90.computes_dx(loss)
    if has_own_dx and not loss.group:
        size = head_tiles.rows_of_chunk(
            M, K, len(t.weight), most or GPU_ROWS, head_sm90.processors(x.device)
        )
    parts = [slice(start, min(start + size, M)) for start in range(0, M, size)]
    chunks = _chunks(flat, loss, size, any(wanted), has_kernels)
    if parts:
        # Until the first product is queued, a GPU is nearly idle.
        chunks.begin(parts[0])
    scales = logsumexp_scales = divisor = None
    if any(wanted):
        divisor = denominator(t, loss, wide) if loss.reduction == "mean" else None
        scales = row_scales(t, loss, grads[0], wide, divisor)
        logsumexp_scales = None if grads[1] is None else grads[1].reshape(M).to(wide)
    losses, lse = (x.new_empty(M, dtype=wide) for _ in range(2))
    products = chunks if has_own_dx and isinstance(chunks, head_sm90.Chunks) else None
    totals = _Totals(flat, wanted, products)
    for part in parts:
        if part.start:
            chunks.begin(part)
        own = (losses[part], lse[part], _part(scales, part), _part(logsumexp_scales, part))
        found = chunks.rows(Chunk(part, *own))
        if found is not None:
            totals.add(part, found)
    if has_kernels:
        # The kernels skip labels that are out of range.
        are_in_range = chunks.are_in_range if isinstance(chunks, head_sm90.Chunks) else None
        if are_in_range is not None and x.is_cuda:
            torch._assert_async(are_in_range)
        elif are_in_range is None or not are_in_range:
            check_labels(t, loss)
    weights = token_weights(t, wide)
    if weights is not None:
        losses = losses * weights
    result = reduced(losses, t, loss, divisor)
    return Found(result, lse.reshape(t.target.shape), totals.gradients(t))


def check_labels(t: Head, loss: Loss) -> None:
    """Raise for labels out of range; on a GPU, in a kernel.

    Args:
        t: The tensors.
        loss: What to compute.

    Raises:
        IndexError: If a label is out of range, as in PyTorch.
    """
    target = t.target
    outside = (target < 0) | (target >= (loss.classes or t.weight.shape[0]))
    outside &= target != loss.ignore_index
    if target.is_cuda:
        torch._assert_async(~outside.any())
    elif outside.any():
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


def _part(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _chunks(
    t: Head, loss: Loss, size: int, keeps: bool, has_kernels: bool
) -> head_sm90.Chunks | Composed:
    if not has_kernels:
        return Composed(t, loss)
    return (ShardedChunks if loss.group else head_sm90.Chunks)(t, loss, size, keeps)


class _Totals:
    """The gradients, summed over chunks."""

    def __init__(self, t: Head, wanted: list[bool], products: head_sm90.Chunks | None) -> None:
        """Allocate the gradients that are wanted; `products` computes that of x, if it can."""
        self.t, (self.wants_x, self.wants_weight, self.wants_bias) = t, wanted
        self.products = products
        dense = torch.contiguous_format
        self.dx = torch.empty_like(t.x, memory_format=dense) if self.wants_x else None
        self.dweight: Tensor | None = None
        self.dbias: Tensor | None = None

    def add(self, part: slice, found: Rows) -> None:
        """Add a chunk's contribution."""
        e, factors = found.exponentials, found.factors
        x, weight = self.t.x[part], self.t.weight
        if self.dx is not None and self.products is not None:
            self.products.input_gradient(self.dx[part], found)
        elif self.dx is not None:
            dx = _product(e, weight)
            if factors is not None:
                dx = torch.mul(
                    dx, factors.unsqueeze(1), out=None if found.others else self.dx[part]
                )
            if found.others is not None:
                dx = dx - found.others.scales.unsqueeze(1) * found.others.mean_weight
            if found.others is not None or factors is None:
                self.dx[part] = dx
        if self.wants_weight:
            scaled = x if found.scaled is None else found.scaled
            is_first = self.dweight is None
            if self.dweight is None:
                self.dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            for columns in _aligned(e):
                own, e_columns = self.dweight[columns], e[:, columns].t()
                if is_first:
                    torch.mm(e_columns, scaled, out=own)
                else:
                    torch.addmm(own, e_columns, scaled, out=own)
            if found.others is not None:
                self.dweight.sub_(
                    torch.outer(found.others.class_weight, found.others.scales @ x.float())
                )
        if self.wants_bias:
            wide = statistics_dtype(x.dtype)
            own = e.sum(0, dtype=wide) if factors is None else _weighted(e, factors)
            if found.others is not None:
                own = own - found.others.class_weight * found.others.scales.sum()
            self.dbias = own if self.dbias is None else self.dbias + own

    def gradients(self, t: Head) -> list[Tensor | None]:
        """Return the gradients, in the shapes and dtypes of their tensors."""
        if not t.target.numel():
            self.dweight = torch.zeros_like(t.weight) if self.wants_weight else None
            self.dbias = t.weight.new_zeros(t.weight.shape[0]) if self.wants_bias else None
        dx = None if self.dx is None else self.dx.reshape(t.x.shape)
        dbias = None if self.dbias is None else self.dbias.to(t.weight.dtype)
        return [dx, self.dweight, dbias]


def _product(e: Tensor, weight: Tensor) -> Tensor:
    """Return E W, unrounded if tensor cores can write float32."""
    is_wide = e.is_cuda and e.dtype in LOW_PRECISION

    def of(part: slice) -> Tensor:
        if is_wide:
            return torch.mm(e[:, part], weight[part], out_dtype=torch.float32)
        return torch.mm(e[:, part], weight[part])

    total, *rest = map(of, _aligned(e))
    for own in rest:
        total += own
    return total


def _aligned(e: Tensor) -> list[slice]:
    """Return slices of a matrix's columns: a multiple of 8, then the rest if there is one.

    If the number of classes is not a multiple of 8, cuBLAS chooses kernels that load element by
    element, five times slower, even if rows start at a multiple of 16 bytes.
    """
    V, pitch = e.shape[1], e.stride(0)
    whole = V - V % _ALIGNED
    if whole in (0, V) or pitch % _ALIGNED:
        return [slice(0, V)]
    return [slice(0, whole), slice(whole, V)]


def _weighted(e: Tensor, factors: Tensor) -> Tensor:
    if e.dtype not in LOW_PRECISION:
        return torch.mv(e.t(), factors)
    # In parts, which widened take little memory.
    return torch.cat([torch.mv(own.float().t(), factors) for own in e.split(_WIDENED, dim=1)])
