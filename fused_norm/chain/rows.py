"""Runs row ops with the kernels of op/rows/op.mojo, on a CPU or on a GPU's current stream."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fused_norm.call.memory import address, statistics_dtype
from fused_norm.chain import row_record as record
from fused_norm.chain.row_record import new_record
from fused_norm.native import build, runtime

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def threads() -> int:
    """Return how many threads a kernel may use: PyTorch's setting, or 1 after a fork.

    libgomp's workers do not survive a fork, and waiting for them would hang.
    """
    return 1 if _forked else torch.get_num_threads()


class _Kernel(NamedTuple):
    """An op for a dtype, where it runs, and records of calls to write on.

    A call takes a record away while it needs it, so that none in another thread can write on it.
    All calls of a kernel write the same fields.
    """

    run: Callable[[int], int]
    context: int
    records: list[tuple[memoryview, int]]


def run(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    parameter: Tensor | None = None,
    parameter_gradient: Tensor | None = None,
) -> None:
    """Run an op on tensors of one shape, dense and not empty.

    Args:
        name: Of the op, as op/rows/op.mojo has it.
        inputs: Tensors to read.
        outputs: Tensors to write, None for what is not wanted.
        parameter: A tensor of one element, in the dtype of the inputs or in float32.
        parameter_gradient: Its gradient to write, if it is wanted.
    """
    x = inputs[0]
    kernel = _kernel(name, x)
    try:
        call, place = kernel.records.pop()
    except IndexError:
        call, place = new_record()
    features = x.shape[-1]
    call[record.M] = rows = x.numel() // features
    call[record.K] = features
    call[record.CONTEXT] = kernel.context
    call[record.THREADS] = threads()
    if parameter is not None:
        parameter = parameter.resolve_neg()
        call[record.PARAMETER] = parameter.data_ptr()
        call[record.PARAMETER_IS_FLOAT32] = parameter.dtype is torch.float32
        call[record.PARAMETER_GRADIENT] = address(parameter_gradient)
        if parameter_gradient is not None:
            shares = x.new_empty(rows, dtype=statistics_dtype(x.dtype))
            call[record.WORKSPACE] = shares.data_ptr()
    for index, output in enumerate(outputs, record.OUTPUTS):
        call[index] = 0 if output is None else output.data_ptr()
    for index, tensor in enumerate(inputs, record.INPUTS):
        call[index] = tensor.data_ptr()
    kernel.run(place)
    kernel.records.append((call, place))


def trainable_eps(x: Tensor) -> tuple[Callable[[int], int], Callable[[int], int], int]:
    """Return the forward and the backward of the trained eps's norm, and their context.

    Args:
        x: A tensor of the dtype, on the device, whose current stream is meant.

    Raises:
        BuildError: If there are none, and no compiler to build them.
    """
    build.check_at_hand(x.device, x.dtype)
    name = "trainable_eps_layer_norm"
    forward, backward = (_kernel(each, x) for each in (name, f"{name}_backward"))
    return forward.run, backward.run, forward.context


def _kernel(name: str, x: Tensor) -> _Kernel:
    if x.is_cpu:
        return _on_cpu(name, x.dtype)
    device = x.device.index
    return _on_gpu(name, x.dtype, device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _on_cpu(name: str, dtype: torch.dtype) -> _Kernel:
    kernels = build.load(build.Extension("rows_cpu", build.DTYPES[dtype]))
    return _Kernel(getattr(kernels, name), build.gomp_parallel(), [])


@functools.cache
def _on_gpu(name: str, dtype: torch.dtype, device: int, stream: int) -> _Kernel:
    accelerator = build.accelerator_of(torch.device("cuda", device))
    kernels = build.load(build.Extension("rows_gpu", build.DTYPES[dtype], accelerator))
    return _Kernel(getattr(kernels, name), _launcher(kernels, device, stream), [])


@functools.cache
def _launcher(kernels: ModuleType, device: int, stream: int) -> int:
    # Blocks of a row op wait for no others, so they may run beside a collective.
    return runtime.new_launcher(kernels, device, stream, True)
