"""Hopper: our own products; for bfloat16 one on a folded weight, whose epilogue finishes the norm.

    y = rstd * (x Wc^T - mean * s) + c    Wc = (W * gamma) centered along K and rounded, s its row
                                          sums, c = b + W beta

So x is read once and its normalized rows never exist. The fold is made again where the weights may
have changed, and kept for inference; those of several Linear layers lie side by side, and one
product writes all of their outputs. The backward of one layer queues dz = dy W, the pass over dz
and x, and dW = dy^T z with db on its way, in one call.

float32 is multiplied here where PyTorch may do so in tf32, and normalized before: rounding x as it
is to tf32 would lose a row whose mean is far from zero. In IEEE float32 PyTorch's product takes
nearly all of the time, and no tensor core helps. The backward needs transposed operands, which tf32
does not have. Both are declined, and so is every call that op/norm_linear/sm90/choice.mojo expects
to be faster with PyTorch's products, or whose matrices TMA cannot read.
"""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_norm.backends.linear import ALIGNMENT
from fused_norm.backends.sm90_kernels import (
    is_hopper,
    launcher_of,
    may_use_tf32,
    prepare_products,
)
from fused_norm.call import frozen
from fused_norm.call.frozen import Frozen, Keys, Prepared
from fused_norm.call.memory import (
    LOW_PRECISION,
    address,
    dense,
    empty_gradients,
    empty_statistics,
    workspace,
)
from fused_norm.call.parameters import Parameters
from fused_norm.call.record import (
    DECLINED,
    FOLD_CONSTANTS,
    FOLD_SUMS,
    FOLD_WEIGHT,
    FUSED,
    KEPT_FOLD,
    MEAN,
    NEW_FOLD,
    PARTS,
    RESIDUAL,
    RSTD,
    SUM,
    WANTED,
    WORKSPACE,
    Call,
    H,
    Planned,
    X,
    Y,
)
from fused_norm.call.results import Results

_DTYPES = LOW_PRECISION | {torch.float32}
_OWN_WAYS = (FUSED, KEPT_FOLD, NEW_FOLD)


def accepts(x: Tensor, parameters: Parameters) -> bool:
    """Return whether x is on a Hopper GPU, in rows that TMA can read; a plan knows of y's."""
    if not x.is_cuda or x.dtype is not parameters.layout.dtype or x.dtype not in _DTYPES:
        return False
    fits = not parameters.layout.K * x.element_size() % ALIGNMENT
    return fits and is_hopper(x.device.index)


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return y, and mean and rstd if asked for; None where PyTorch's product is faster."""
    found = product(Rows(x), parameters, eps, statistics, False)
    return found and (found.outputs[0], found.mean, found.rstd)


class Rows(NamedTuple):
    """What is normalized, dense: x, or x + residual; and its statistics if they are known."""

    x: Tensor
    residual: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None


def product(
    rows: Rows, parameters: Parameters, eps: float, keeps: bool, keeps_h: bool
) -> Results | None:
    """Return a product, which its epilogue activates if the parameters say so, and what is kept.

    Args:
        rows: Of a type and on a device that `accepts` takes; statistics are not those of a sum.
        parameters: Its norm, its weights and its activation.
        eps: Added to the variance.
        keeps: Whether a backward follows, which needs mean and rstd.
        keeps_h: Whether it needs the product before its activation.

    Returns:
        y `[..., N]` of each Linear layer, the sum, mean, rstd and h as far as there is a use for
        them; or None where our passes around products are faster.
    """
    x, residual, *given = rows
    if parameters.layout.dtype is torch.float32 and not may_use_tf32():
        return None
    device = parameters.layout.device.index
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernels, context = launcher_of(parameters, stream)
    in_graph = torch.cuda.is_current_stream_capturing()
    prepare_products(device, in_graph)
    if keeps:
        frozen.require_values(parameters.tensors)
    # Only frozen parameters have folds that outlive a call.
    found = None if keeps else frozen.find(parameters.tensors)
    may_keep = found is not None and parameters.layout.dtype is torch.bfloat16
    start = x.data_ptr()
    is_given = rows.rstd is not None
    statistics = keeps and not is_given
    # Plans ask of an address whether there is one, and how it is aligned.
    added = 0 if residual is None else ALIGNMENT + residual.data_ptr() % ALIGNMENT
    conditions = (
        *(eps, context, in_graph, statistics, keeps_h),
        *(is_given, added, start % ALIGNMENT),
    )
    asked = asked_way(may_keep)
    is_offloaded = found is not None and found[0].is_offloaded(found[1])
    if is_offloaded:
        asked = KEPT_FOLD
    planned = _plan(kernels, x, parameters, may_keep, asked, conditions)
    fold = None
    if planned.way == KEPT_FOLD and found is not None:
        fold = _fold(*found, parameters, kernels, context, stream, in_graph)
    if is_offloaded and fold is None:
        frozen.require_values(parameters.tensors)
    if planned.way == KEPT_FOLD and fold is None:
        planned = _plan(kernels, x, parameters, False, asked_way(False), conditions)
    if planned.way not in _OWN_WAYS:
        return None
    sizes = parameters.layout.sizes or (parameters.layout.N,)
    outputs = [x.new_empty(*x.shape[:-1], size) for size in sizes]
    mean, rstd = empty_statistics(x, parameters.has_mean) if statistics else (None, None)
    size = planned.workspace_bytes
    scratch = workspace(size, x.device) if size else None
    record = call, place = planned.take()
    call[X], call[Y] = start, outputs[0].data_ptr()
    if parameters.layout.sizes:
        parts = parameters.parts(outputs)
        call[PARTS] = ctypes.addressof(parts)
    total = None
    if is_given:
        call[MEAN], call[RSTD] = map(address, given)
    elif statistics:
        call[MEAN], call[RSTD] = address(mean), address(rstd)
    if residual is not None:
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        call[RESIDUAL], call[SUM] = residual.data_ptr(), total.data_ptr()
    h = None
    if keeps_h:
        h = x.new_empty(*x.shape[:-1], parameters.products)
        call[H] = h.data_ptr()
    if scratch is not None:
        call[WORKSPACE] = scratch.data_ptr()
    if fold is not None:
        call[FOLD_WEIGHT], call[FOLD_SUMS], call[FOLD_CONSTANTS] = fold.addresses
    kernels.forward(place)
    planned.give_back(record)
    return Results(outputs, total, None, mean, rstd, [] if h is None else [h])


def frozen_fold(parameters: Parameters) -> tuple[Tensor, ...] | None:
    """Return Wc `[N, K]`, and s and c `[2, N]`, of frozen parameters; None for others.

    They may be read on the current stream until the parameters are thawed.
    """
    found = frozen.find(parameters.tensors)
    if found is None:
        return None
    stream = torch._C._cuda_getCurrentRawStream(parameters.layout.device.index)
    fold = _fold(*found, parameters, *launcher_of(parameters, stream), stream, False)
    return None if fold is None else fold.tensors


def _fold(
    record: Frozen,
    keys: Keys,
    parameters: Parameters,
    kernels: ModuleType,
    context: int,
    stream: int,
    in_graph: bool,
) -> Prepared | None:
    """Return the fold of frozen parameters, made now unless a CUDA graph captures the call."""
    name = ("fold", parameters.norm)
    is_late = in_graph or record.is_offloaded(keys)
    make = None if is_late else functools.partial(make_fold, parameters, kernels, context)
    fold = record.prepared((*name, keys), make)
    if fold is not None:
        fold.read_on(stream, in_graph)
        if record.offloads and not in_graph:
            record.offload(name, keys)
    return fold


def _plan(
    kernels: ModuleType,
    x: Tensor,
    parameters: Parameters,
    may_keep: bool,
    asked: int,
    conditions: tuple[Any, ...],
) -> Planned:
    """Return the plan of a forward, made once for all that it depends on."""
    key = (x.numel(), may_keep, asked, conditions)
    planned = parameters.layout.plans.get(key)
    if planned is None:
        eps, context, in_graph, statistics, keeps_h, is_given, added, _ = conditions
        call = parameters.call(x, eps)
        call.context, call.in_graph, call.may_keep, call.way = context, in_graph, may_keep, asked
        call.has_statistics = is_given
        call.rstd = WANTED if statistics or is_given else 0
        call.mean = call.rstd if parameters.has_mean else 0
        call.residual = added
        call.activation, call.h = parameters.norm[2], WANTED if keeps_h else 0
        kernels.plan_forward(ctypes.addressof(call))
        planned = parameters.plan(key, call)
    return planned


def backward(
    grad_output: Tensor,
    x: Tensor,
    parameters: Parameters,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
    wanted: list[bool],
    main_grad: Tensor | None,
    dsum: Tensor | None = None,
) -> list[Tensor | None] | None:
    """Return the gradients that are wanted; None where PyTorch's products are faster.

    That of x takes in dsum, which reaches it besides.
    """
    accumulates = main_grad is not None
    if x.dtype is torch.float32 or (main_grad is not None and not main_grad.is_contiguous()):
        return None
    dy, x, dsum = dense(grad_output, x, dsum)
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    kernels, context = launcher_of(parameters, stream)
    call = parameters.call(x, eps)
    place = ctypes.addressof(call)
    call.context, call.in_graph = context, torch.cuda.is_current_stream_capturing()
    prepare_products(x.device.index, call.in_graph)
    call.accumulate = accumulates
    call.dy, call.mean, call.rstd = dy.data_ptr(), address(mean), rstd.data_ptr()
    call.dsum = address(dsum)
    call.dx, call.dgamma, call.dbeta, call.dweight, call.dbias = wanted
    if main_grad is not None:
        call.dweight = main_grad.data_ptr()
    kernels.plan_backward(place)
    if call.way == DECLINED:
        return None
    gradients = empty_gradients(
        x, parameters, [*wanted[:3], wanted[3] and not accumulates, wanted[4]]
    )
    results = gradients.copy()
    if accumulates:
        # The kernel adds to both what it writes in float32.
        results[3] = main_grad
        results[4] = x.new_zeros(parameters.layout.N, dtype=torch.float32) if wanted[4] else None
    call.dx, call.dgamma, call.dbeta, call.dweight, call.dbias = map(address, results)
    scratch = _scratch(call, x)
    kernels.backward(place)
    del scratch
    if accumulates and gradients[4] is not None and results[4] is not None:
        gradients[4].copy_(results[4])
    return gradients


def asked_way(may_keep: bool) -> int:
    """Return the way that a forward is to run, 0 for what the plan finds fastest.

    Tests and measurements put others in its place.

    Args:
        may_keep: Whether a fold may be kept.
    """
    return 0


def _scratch(call: Call, x: Tensor) -> Tensor | None:
    """Give a call its workspace."""
    size: int = call.workspace_bytes
    if not size:
        return None
    memory = workspace(size, x.device)
    call.workspace = memory.data_ptr()
    return memory


def make_fold(parameters: Parameters, kernels: ModuleType, context: int) -> Prepared:
    """Return the fold of parameters, Wc and s beside c, once any stream may read it.

    Args:
        parameters: Of a call in bfloat16.
        kernels: Hopper's.
        context: Of their calls on the current stream.
    """
    weight = parameters.tensors[2]
    rows = parameters.products

    def memory() -> tuple[Tensor, ...]:
        sums = weight.new_empty(2, rows, dtype=torch.float32)
        return weight.new_empty(rows, parameters.layout.K), sums

    folded, sums = frozen.allocate(memory, weight.device)
    addresses = folded.data_ptr(), sums.data_ptr(), sums[1].data_ptr()
    call = parameters.call(weight, 0.0)
    call.context, call.activation = context, parameters.norm[2]
    call.fold_weight, call.fold_sums, call.fold_constants = addresses
    kernels.fold(ctypes.addressof(call))
    stream = torch.cuda.current_stream(weight.device)
    stream.synchronize()
    return Prepared((folded, sums), stream.cuda_stream, addresses=addresses)
