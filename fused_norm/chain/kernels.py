"""Which kernels serve a dtype, a device and its stream: the chain asks this once for each.

On a CPU, a product normalizes rows as it packs them, on PyTorch's threads. On Hopper, a product of
our own in bfloat16 uses a folded weight. Elsewhere, passes run around PyTorch's products. The
kernels' plans choose among what is available.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_norm.activations import ACTIVATIONS
from fused_norm.call.memory import LOW_PRECISION, dense, in_memory
from fused_norm.devices import choice
from fused_norm.devices.machine import cpu_kind, hopper_kind
from fused_norm.native import build, compiler, runtime
from fused_norm.native.cache import BuildError
from fused_norm.native.cpu_features import bfloat16_product
from fused_norm.norms import NORMS, by_number

# TMA boxes, and so all rows, start at a multiple of 16 bytes.
ALIGNMENT = 16

# OpenMP's workers do not survive a fork, and waiting for them would hang.
_PROCESS = os.getpid()

# PyTorch's numbers, which do not change.
_DTYPES = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}
NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def left_to_pytorch(dtype: torch.dtype) -> str | None:
    """Return the CPU flags that make PyTorch's product always faster than ours, None without."""
    return bfloat16_product() if dtype is torch.bfloat16 else None


def cpu_strategy() -> int:
    """Return the strategy of calls on a CPU: FUSED, AROUND_PRODUCTS, or 0 for the faster one.

    Tests and measurements replace this function.
    """
    return 0


def gpu_strategy(may_keep: bool) -> int:
    """Return the strategy of a forward on Hopper, 0 for the one that its plan finds fastest.

    Tests and measurements replace this function.

    Args:
        may_keep: Whether a fold may be kept.
    """
    return 0


def hopper_costs(device: int, dtype: torch.dtype) -> int:
    """Return the address of the costs of products on a Hopper GPU, 0 if they were not measured.

    Measurements replace this function.
    """
    return choice.address(hopper_kind(device), build.DTYPES[dtype])


def in_aligned_memory(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return tensors in dense memory, aligned to ALIGNMENT; None stays None."""
    return tuple(
        v.clone() if v is not None and v.data_ptr() % ALIGNMENT else v
        for v in dense(*in_memory(tensors))
    )


def is_alone() -> bool:
    """Return whether no collective, which waits for other GPUs, is running."""
    return not torch.distributed.is_initialized()


def is_hopper(device: int) -> bool:
    """Return whether the device with an index exists and has Hopper's kernels."""
    return _is_hopper(device)


# PyTorch's compiler cannot trace a question to the driver, and warns of a cache.
is_hopper.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def _is_hopper(device: int) -> bool:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def may_use_tf32() -> bool:
    """Return whether PyTorch may multiply float32 in tf32, through whichever of its settings.

    The setting may change before the next call. `allow_tf32` raises an error if both of PyTorch's
    APIs for it have been used.
    """
    precision: str = torch._C._get_fp32_precision_getter("cuda", "matmul")
    return precision == "tf32"


def cpu_extension(name: str, dtype: torch.dtype) -> ModuleType:
    """Return a CPU extension, loaded."""
    return build.load(build.Extension(name, build.DTYPES[dtype]))


def passes_for(x: Tensor) -> tuple[ModuleType, int, int]:
    """Return the passes for a tensor, and the context and the threads of a call."""
    if x.is_cpu:
        threads = torch.get_num_threads() if os.getpid() == _PROCESS else 1
        return cpu_extension("passes_cpu", x.dtype), build.gomp_parallel(), threads
    device = x.device.index or 0
    stream = torch._C._cuda_getCurrentRawStream(device)
    # Blocks of a pass do not wait for each other, so they may run along with a collective.
    return (*launcher(gpu_extension("passes_gpu", x.dtype, device), device, stream, True), 0)


def gpu_extension(name: str, dtype: torch.dtype, device: int) -> build.Extension:
    """Return an extension for any GPU, by the device's index."""
    accelerator = build.accelerator_of(torch.device("cuda", device))
    return build.Extension(name, build.DTYPES[dtype], accelerator)


@functools.cache
def hopper_extension(dtype: torch.dtype, norm: int) -> build.Extension:
    """Return Hopper's extension for a dtype and a norm, by its number."""
    return build.hopper_extension(build.DTYPES[dtype], by_number(norm))


@functools.cache
def launcher(
    kernels: build.Extension, device: int, stream: int, alone: bool, costs: int = 0
) -> tuple[ModuleType, int]:
    """Return an extension's module, and the context of its calls on a stream.

    Args:
        kernels: The extension.
        device: Index of the device.
        stream: PyTorch's raw stream.
        alone: Whether no collective runs at the same time.
        costs: Address of the device's costs, from which products choose; 0 for none.
    """
    module = build.load(kernels)
    context = runtime.new_launcher(module, device, stream, alone)
    if costs:
        module.use_costs(context, costs)
    return module, context


def may_multiply(x: Tensor, N: int, K: int) -> bool:
    """Return whether a product of x may be one of Hopper's, which adds a residual.

    Args:
        x: Of shape `[..., K]`.
        N: Outputs of the product.
        K: Length of the sums.
    """
    if not x.is_cuda or x.dtype not in LOW_PRECISION or not is_hopper(x.device.index or 0):
        return False
    elements = ALIGNMENT // x.dtype.itemsize
    return not (N % elements or K % elements)


class Question(ctypes.Structure):
    """`Question` in chain.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "is_cpu", "device", "is_rows")),
        *((name, ctypes.c_int64) for name in ("stream", "normalization")),
        *((n, ctypes.c_int32) for n in ("is_alone", "may_use_tf32", "invariant", "is_eight_bits")),
    )


class Answer(ctypes.Structure):
    """`Answer` in chain.h."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("product", "passes")),
        *(
            (n, ctypes.c_int64)
            for n in ("product_context", "passes_context", "strategy", "kept_strategy")
        ),
        ("costs", ctypes.c_int64),
    )


_Find = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Question), ctypes.POINTER(Answer), ctypes.POINTER(ctypes.c_char_p)
)
_Ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32)


class _Told(ctypes.Structure):
    """`Python` in chain.h."""

    _fields_ = (
        *(("find", _Find), ("conditions", _Ask), ("prepare", _Ask)),
        *(("numbers", ctypes.c_char_p), ("with_mean", ctypes.c_int), ("told", ctypes.c_int)),
    )


def find(question: Any, answer: Any) -> None:
    """Write the kernels that answer a question.

    Args:
        question: A `Question`.
        answer: An `Answer`.

    Raises:
        BuildError: If there are none, and no compiler to build them.
    """
    if question.is_eight_bits:
        _find_eight_bits(question, answer)
        return
    dtype, device = _DTYPES[question.dtype], question.device
    build.check_at_hand(
        torch.device("cpu") if question.is_cpu else torch.device("cuda", device), dtype
    )
    if question.is_rows:
        _fill(answer, b"", 0, *_passes(question, dtype))
        return
    if question.is_cpu:
        is_ours = question.invariant or cpu_strategy() or not left_to_pytorch(dtype)
        # The product first: where the compiler fails, its error names what most calls lack.
        product = _file(cpu_path("norm_linear_cpu", dtype)) if is_ours else b""
        _fill(answer, product, build.gomp_parallel(), *_passes(question, dtype))
        answer.strategy = cpu_strategy()
        answer.costs = choice.address(cpu_kind(), build.DTYPES[dtype])
        return
    passes = _passes(question, dtype)
    product, own = b"", 0
    is_served = dtype in LOW_PRECISION or question.may_use_tf32
    if is_served and is_hopper(device):
        kernels = hopper_extension(dtype, question.normalization)
        costs = hopper_costs(device, dtype)
        own = launcher(kernels, device, question.stream, bool(question.is_alone), costs)[1]
        product = _file(str(kernels.path))
    _fill(answer, product, own, *passes)
    answer.strategy, answer.kept_strategy = gpu_strategy(False), gpu_strategy(True)


def _find_eight_bits(question: Any, answer: Any) -> None:
    product, own = b"", 0
    if not question.is_cpu and is_hopper(question.device):
        extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
        own = launcher(extension, question.device, question.stream, True)[1]
        product = _file(str(extension.path))
    _fill(answer, product, own, b"", 0)


def _passes(question: Any, dtype: torch.dtype) -> tuple[bytes, int]:
    """Return the file of the passes, or of the row ops, and the context of their calls."""
    name = "rows" if question.is_rows else "passes"
    if question.is_cpu:
        return _file(cpu_path(f"{name}_cpu", dtype)), build.gomp_parallel()
    extension = gpu_extension(f"{name}_gpu", dtype, question.device)
    # Blocks of a pass do not wait for each other, so they may run along with a collective.
    _, context = launcher(extension, question.device, question.stream, True)
    return _file(str(extension.path)), context


@functools.cache
def cpu_path(name: str, dtype: torch.dtype) -> str:
    """Return the file of a CPU extension, loaded."""
    cpu_extension(name, dtype)
    return str(build.Extension(name, build.DTYPES[dtype]).path)


@functools.cache
def _file(path: str) -> bytes:
    # Cached, because C++ keeps the address.
    return path.encode()


def _fill(answer: Any, product: bytes, own: int, passes: bytes, context: int) -> None:
    answer.product, answer.product_context = product, own
    answer.passes, answer.passes_context = passes, context


class _Thread(threading.local):
    error = b""


_thread = _Thread()


def _find(question: Any, answer: Any, error: Any) -> int:
    try:
        find(question[0], answer[0])
    except Exception as fault:
        # No exception may leave a callback of ctypes, which would drop it: C++ raises it again.
        if isinstance(fault, BuildError) and compiler.version() is None:
            # PyTorch's ops compute the call, and a notice says once what is missing.
            return 1
        _thread.error = str(fault).encode()
        error[0] = _thread.error
        return 2
    return 0


def _conditions(device: int) -> int:
    return is_alone() | may_use_tf32() << 1


def _prepare(device: int) -> int:
    """Initialize PyTorch's products in this thread, before a captured graph needs them.

    Their library cannot be initialized in a capture, and warm-up calls may all choose our products.
    """
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return 0
        torch.cuda.current_blas_handle()
    return 1


_NUMBERED = {name: norm.number for name, norm in NORMS.items()}
_NUMBERED |= {name: each.number for name, each in ACTIVATIONS.items()}
_NUMBERS = " ".join(f"{name}={number}" for name, number in _NUMBERED.items())
_numbers = itertools.count(1)
_WITH_MEAN = sum(1 << norm.number for norm in NORMS.values() if norm.has_mean)
_TOLD = _Told(_Find(_find), _Ask(_conditions), _Ask(_prepare), _NUMBERS.encode(), _WITH_MEAN)


def tell(library: ctypes.CDLL, again: int = 0) -> int:
    """Give the chain the functions that it calls; it then looks all kernels up again.

    Args:
        library: The chain.
        again: A number from an earlier call, to restore the kernels that were known then.

    Returns:
        A number for this set of kernels.
    """
    _TOLD.told = again or next(_numbers)
    library.chain_tell(ctypes.byref(_TOLD))
    return int(_TOLD.told)
