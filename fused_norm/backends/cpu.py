"""The CPU's kernels: one product that normalizes rows as it packs them, on PyTorch's threads."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from types import ModuleType

import torch
from torch import Tensor

from fused_norm import reference
from fused_norm.call.memory import address, dense, empty_gradients, empty_statistics, workspace
from fused_norm.call.parameters import Parameters
from fused_norm.call.record import DECLINED, MEAN, MOST_KEPT, RSTD, WORKSPACE, Call, X, Y
from fused_norm.native import build
from fused_norm.native.cpu_features import bfloat16_product

_forked = False
_kept = threading.local()


def accepts(x: Tensor, parameters: Parameters) -> bool:
    """Return whether x is on a CPU, in the dtype of the weight."""
    return x.is_cpu and x.dtype is parameters.layout.dtype


def is_left_to_pytorch(x: Tensor) -> bool:
    """Return whether PyTorch's own product is faster than ours on a CPU, whatever the sizes."""
    return x.dtype is torch.bfloat16 and x.is_cpu and bfloat16_product() is not None


@functools.lru_cache(maxsize=1024)
def declines(dtype: torch.dtype, M: int, K: int, N: int, follows: bool) -> bool:
    """Return whether PyTorch's own ops are faster at some sizes, as the plan has it.

    Args:
        dtype: Of the tensors.
        M: Rows.
        K: Features.
        N: Outputs.
        follows: Whether a backward follows.
    """
    call = Call(M=M, K=K, N=N, threads=1, rstd=follows, way=asked_way())
    extension("norm_linear_cpu", dtype).plan_forward(ctypes.addressof(call))
    way: int = call.way
    return way == DECLINED


def asked_way() -> int:
    """Return the way that plans are asked for; 0 leaves it to them."""
    return 0


def threads() -> int:
    """Return how many threads a kernel may use: PyTorch's setting, or 1 after a fork.

    libgomp's workers do not survive a fork, and waiting for them would hang.
    """
    return 1 if _forked else torch.get_num_threads()


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return y, and mean and rstd if asked for; None where PyTorch's own ops are faster."""
    kernels = extension("norm_linear_cpu", x.dtype)
    count = threads()
    key = (x.numel(), eps, statistics, count)
    planned = parameters.layout.plans.get(key)
    if planned is None:
        template = _record(x, parameters, eps)
        template.rstd = int(statistics)
        template.mean = int(statistics and parameters.has_mean)
        kernels.plan_forward(ctypes.addressof(template))
        planned = parameters.plan(key, template)
    if planned.way == DECLINED:
        return None
    y = x.new_empty(*x.shape[:-1], parameters.layout.N)
    mean, rstd = empty_statistics(x, parameters.has_mean) if statistics else (None, None)
    size = planned.workspace_bytes
    memory = scratch(size) if size else None
    record = call, place = planned.take()
    call[X], call[Y] = x.data_ptr(), y.data_ptr()
    if statistics:
        call[MEAN], call[RSTD] = address(mean), address(rstd)
    if memory is not None:
        call[WORKSPACE] = memory.data_ptr()
    kernels.forward(place)
    planned.give_back(record)
    return y, mean, rstd


def backward(
    grad_output: Tensor,
    x: Tensor,
    parameters: Parameters,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
    wanted: list[bool],
    main_grad: Tensor | None,
) -> list[Tensor | None] | None:
    """Return the gradients that are wanted; None where PyTorch's own ops are faster."""
    if declines(
        x.dtype, x.numel() // parameters.layout.K, parameters.layout.K, parameters.layout.N, True
    ):
        return None
    kernels = extension("norm_linear_cpu", x.dtype)
    dy, x = dense(grad_output, x)
    if main_grad is not None:
        # The kernels round the weight's gradient to its dtype.
        gamma, beta, *_ = parameters.tensors
        reference.add_weight_gradient(main_grad, dy, x, gamma, beta, eps)
        wanted = [*wanted[:3], False, wanted[4]]
    gradients = empty_gradients(x, parameters, wanted)
    call = _record(x, parameters, eps)
    place = ctypes.addressof(call)
    call.dx, call.dgamma, call.dbeta, call.dweight, call.dbias = map(address, gradients)
    call.dy, call.mean, call.rstd = dy.data_ptr(), address(mean), rstd.data_ptr()
    kernels.plan_backward(place)
    size: int = call.workspace_bytes
    memory = scratch(size) if size else None
    call.workspace = address(memory)
    kernels.backward(place)
    return gradients


@functools.cache
def library(name: str, dtype: torch.dtype) -> str:
    """Return the file of an extension for a dtype, loaded."""
    extension(name, dtype)
    return str(build.Extension(name, build.DTYPES[dtype]).path)


def _record(x: Tensor, parameters: Parameters, eps: float) -> Call:
    call = parameters.call(x, eps)
    call.context, call.threads = build.gomp_parallel(), threads()
    call.way = asked_way()
    return call


def scratch(size: int) -> Tensor:
    """Return memory for a call: that of the thread's calls before, if it is large enough.

    Fresh memory would cost a page fault for every 4 KiB. PyTorch's own products keep theirs, too.
    """
    kept: Tensor | None = getattr(_kept, "memory", None)
    if kept is not None and kept.numel() >= size:
        return kept
    memory = workspace(size, torch.device("cpu"))
    if size <= MOST_KEPT:
        _kept.memory = memory
    return memory


@functools.cache
def extension(name: str, dtype: torch.dtype) -> ModuleType:
    """Return the kernels of an extension for a dtype."""
    return build.load(build.Extension(name, build.DTYPES[dtype]))


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
