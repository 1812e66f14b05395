"""Hopper's kernels: those of a dtype and a norm, on a stream, and what they need beside."""

from __future__ import annotations

import functools
import threading
from types import ModuleType

import torch
from torch import Tensor

from fused_norm.call.memory import LOW_PRECISION
from fused_norm.call.parameters import Parameters
from fused_norm.native import build, runtime


def is_alone() -> bool:
    """Return whether no collective, which waits for other GPUs, runs beside our kernels."""
    return not torch.distributed.is_initialized()


@functools.cache
def is_hopper(device: int) -> bool:
    """Return whether a device has these kernels, by its index."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


# PyTorch's compiler cannot trace a question to the driver.
is_hopper.__wrapped__.__dict__["_dynamo_marked_constant"] = True


def launcher_of(parameters: Parameters, stream: int) -> tuple[ModuleType, int]:
    """Return the kernels for some parameters, and the context of their calls on a stream."""
    alone = is_alone()
    found: tuple[ModuleType, int] | None = parameters.layout.launchers.get((stream, alone))
    if found is None:
        kernels = extension(parameters.layout.dtype, parameters.norm[0])
        found = launcher(kernels, parameters.layout.device.index, stream, alone)
        parameters.layout.launchers[stream, alone] = found
    return found


@functools.cache
def launcher(
    kernels: build.Extension, device: int, stream: int, alone: bool
) -> tuple[ModuleType, int]:
    """Return an extension's module, and the context of its calls on a stream.

    Args:
        kernels: The extension.
        device: Index of the device.
        stream: Of PyTorch's, raw.
        alone: Whether no collective runs beside.
    """
    module = build.load(kernels)
    return module, runtime.new_launcher(module, device, stream, alone)


@functools.cache
def extension(dtype: torch.dtype, norm: int) -> build.Extension:
    """Return the extension for a dtype and a norm, by its number."""
    return build.Extension(
        build.HOPPER_EXTENSION, build.DTYPES[dtype], "nvidia:sm_90a", norm=build.NORMS[norm]
    )


def library(x: Tensor, norm: int, is_alone: bool) -> tuple[str, int]:
    """Return the file of the kernels, and the context of their calls on the current stream.

    No file where they serve no call like x: in float32 that may not be multiplied in tf32, and on
    other GPUs than Hopper's.

    Args:
        x: A tensor of the dtype, on the device.
        norm: The number of the norm.
        is_alone: Whether no collective runs beside.
    """
    device: int = x.device.index
    has_kernels = x.dtype in LOW_PRECISION or (x.dtype is torch.float32 and may_use_tf32())
    if not has_kernels or not is_hopper(device):
        return "", 0
    kernels = extension(x.dtype, norm)
    stream = torch._C._cuda_getCurrentRawStream(device)
    return str(kernels.path), launcher(kernels, device, stream, is_alone)[1]


def may_use_tf32() -> bool:
    """Return whether PyTorch may multiply float32 in tf32, however it was told so.

    It may be told otherwise before the next call. `allow_tf32` raises an error where both of
    PyTorch's settings have been used.
    """
    precision: str = torch._C._get_fp32_precision_getter("cuda", "matmul")
    return precision == "tf32"


class _Thread(threading.local):
    prepared: frozenset[int] = frozenset()


_thread = _Thread()


def prepare_products(device: int, in_graph: bool) -> None:
    """Have PyTorch's products ready in this thread, before a graph that chooses them needs them.

    Their library cannot begin within a capture, and calls made to warm up may all choose ours.
    """
    if device not in _thread.prepared and not in_graph:
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()
        _thread.prepared |= {device}
