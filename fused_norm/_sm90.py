"""The fused way on Hopper: one GEMM on a folded weight, whose epilogue finishes the LayerNorm.

    y = rstd * (x Wc^T - mean * s) + c    Wc = (W * gamma) centred along K and rounded, s its row
                                          sums, c = b + W beta

So x is read once and its normalised rows never exist. The fold is made anew where the weights may
have changed, and kept for calls that no gradient follows.

The backward queues dz = dy W, the pass over dz and x, and dW = dy^T z with db on its way, in one
call; many and long rows pass in the kernel that makes them, unless `torch.distributed` is in use.
Where those products would leave much of the GPU idle, PyTorch's do them.

float32 is multiplied here where PyTorch may do so in tf32, and normalised before: rounding x as it
is to tf32 would lose a row whose mean is far from zero. In IEEE float32 PyTorch's product takes
nearly all of the time, and no tensor core helps. The backward needs transposed operands, which
there are not in tf32: both are left to the composed way.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from fused_norm import _gpu, _native
from fused_norm._choices import fastest, fastest_in_tf32
from fused_norm._folds import Fold, kept
from fused_norm._memory import (
    address,
    affine_is_float32,
    dense,
    empty_gradients,
    empty_statistics,
    workspace,
)
from fused_norm._parameters import Parameters

# A box of the copy engine starts at a multiple of 16 bytes, and so does every row.
ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(x: Tensor, linear_weight: Tensor) -> bool:
    """Return whether the kernels can take a call.

    Args:
        x: Input of shape `[..., K]` on a GPU.
        linear_weight: Weight of shape `[N, K]`.
    """
    if x.dtype not in _DTYPES or not _is_hopper(x.device.index):
        return False
    outputs, features = linear_weight.shape
    elements = ALIGNMENT // x.element_size()
    return not (outputs % elements or features % elements)


def forward(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y of shape `[..., N]`, and mean and rstd of shape `[...]` if asked for."""
    if parameters.dtype is torch.float32 and not _may_use_tf32():
        return _gpu.forward(x, parameters, eps, statistics)
    outputs, features = parameters.outputs, parameters.features
    rows = x.numel() // features
    stream = torch._C._cuda_getCurrentRawStream(parameters.device.index)
    in_graph = torch.cuda.is_current_stream_capturing()
    _prepare_products(parameters.device.index, in_graph)
    # In float16, sums far from zero lose more to the tensor cores than y to its rounding.
    may_fold = parameters.dtype is torch.bfloat16
    # Where a gradient follows, the parameters are about to change: a fold kept is memory lost.
    may_keep = may_fold and not statistics
    if may_keep and fastest(rows, features, outputs, in_graph, True) == "k":
        fold = kept(parameters, stream, in_graph)
        if fold is not None:
            if not fold.tensors:
                _make(parameters, stream, fold)
            return folded(x, parameters, eps, statistics, stream, fold)
    if parameters.dtype is torch.float32:
        way = fastest_in_tf32(rows, features, outputs)
    else:
        way = fastest(rows, features, outputs, in_graph, False)
    if way == "a" and may_fold:
        fold = Fold(())
        _make(parameters, stream, fold)
        return folded(x, parameters, eps, statistics, stream, fold)
    if way == "t":
        return _gpu.forward(x, parameters, eps, statistics)
    return composed(x, parameters, eps, statistics, stream)


def folded(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool, stream: int, fold: Fold
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Multiply x as it is by a folded weight, and normalise the products."""
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    outputs, features = parameters.outputs, parameters.features
    rows = x.numel() // features
    y = x.new_empty(*x.shape[:-1], outputs)
    mean, rstd = empty_statistics(x) if statistics else (None, None)
    if mean is not None and rstd is not None:
        results = mean.data_ptr(), rstd.data_ptr()
    else:
        results = fold.unread_statistics(rows, x)
    kernels, launcher, _ = _launcher(parameters.dtype, parameters.device.index, stream, _is_alone())
    kernels.forward(
        *(launcher, y.data_ptr(), *results, x.data_ptr(), *fold.addresses),
        *(rows, outputs, features, eps),
    )
    return y, mean, rstd


def backward(
    grad_output: Tensor,
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    mask: list[bool],
    main_grad: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the gradients that the mask asks for, None in place of the others.

    Where there is a `main_grad` `[N, K]` in float32, the weight's gradient is added to it instead.
    """
    if x.dtype is torch.float32:
        arguments = (grad_output, x, ln_weight, ln_bias, linear_weight, mean, rstd, eps, mask)
        return _gpu.backward(*arguments)
    dy, x, ln_weight, ln_bias, linear_weight = dense(
        grad_output, x, ln_weight, ln_bias, linear_weight
    )
    outputs, features = linear_weight.shape
    rows = x.numel() // features
    device = x.device.index
    in_graph = torch.cuda.is_current_stream_capturing()
    _prepare_products(device, in_graph)
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernels, launcher, _ = _launcher(x.dtype, device, stream, _is_alone())
    size = _backward_workspace(
        *(kernels, launcher, rows, outputs, features, mask[1] or mask[2], mask[3]),
        in_graph,
    )
    matrices = dy.data_ptr(), x.data_ptr(), linear_weight.data_ptr()
    accumulates = main_grad is not None
    if (
        size < 0
        or any(a % ALIGNMENT for a in (*matrices, address(main_grad)))
        or not (main_grad is None or main_grad.is_contiguous())
    ):
        inputs = (dy, x, ln_weight, ln_bias, linear_weight)
        return _gpu.backward(*inputs, mean, rstd, eps, mask, main_grad)
    gradients = empty_gradients(
        x, ln_weight, ln_bias, linear_weight, [*mask[:3], mask[3] and not accumulates, mask[4]]
    )
    results = gradients.copy()
    if accumulates:
        # The kernel adds to both what it writes in float32.
        results[3] = main_grad
        results[4] = x.new_zeros(outputs, dtype=torch.float32) if mask[4] else None
    scratch = workspace(size, x.device)
    kernels.backward(
        launcher,
        *map(address, results),
        *(matrices[0], matrices[1], address(ln_weight), address(ln_bias), matrices[2]),
        *(mean.data_ptr(), rstd.data_ptr(), scratch.data_ptr(), rows, outputs, features, eps),
        *(affine_is_float32(ln_weight, ln_bias), accumulates),
    )
    if accumulates and gradients[4] is not None and results[4] is not None:
        gradients[4].copy_(results[4])
    return gradients


def functions(x: Tensor, parameters: Parameters) -> tuple[int, ...] | None:
    """Return the addresses of both passes on the current stream, and of its launcher.

    The forward is that of `composed`, 0 where another is faster. None in a graph, which has other
    thresholds, and where the host's time does not count; and in float32, whose products are
    PyTorch's.
    """
    if parameters.dtype is torch.float32 or torch.cuda.is_current_stream_capturing():
        return None
    device: int = parameters.device.index
    _prepare_products(device, False)
    stream = torch._C._cuda_getCurrentRawStream(device)
    # An x that does not fit the weight may be shorter than a row of it.
    rows = max(x.numel() // parameters.features, 1)
    sizes = (rows, parameters.features, parameters.outputs)
    return _functions(parameters.dtype, device, stream, _is_alone(), *sizes)


@functools.lru_cache(maxsize=4096)
def _functions(
    dtype: torch.dtype,
    device: int,
    stream: int,
    alone: bool,
    rows: int,
    features: int,
    outputs: int,
) -> tuple[int, ...]:
    found = _native.functions(_extension(dtype))
    launcher = _launcher(dtype, device, stream, alone)[1]
    composes = fastest(rows, features, outputs, False, False) == "c"
    return *(found[:2] if composes else (0, 0)), *found[2:], launcher


@functools.lru_cache(maxsize=4096)
def _backward_workspace(kernels: Any, *arguments: int) -> int:
    """Return the bytes that a backward needs, -1 where PyTorch's products are faster."""
    size: int = kernels.backward_workspace(*arguments)
    return size


def composed(
    x: Tensor, parameters: Parameters, eps: float, statistics: bool, stream: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Normalise the rows, then multiply: both kernels in one call."""
    if parameters.weight % ALIGNMENT or parameters.bias % ALIGNMENT:
        return _gpu.forward(x, parameters, eps, statistics)
    outputs, features = parameters.outputs, parameters.features
    z = torch.empty_like(x)
    y = x.new_empty(*x.shape[:-1], outputs)
    mean, rstd = empty_statistics(x) if statistics else (None, None)
    kernels, launcher, _ = _launcher(parameters.dtype, parameters.device.index, stream, _is_alone())
    kernels.composed_forward(
        *(launcher, y.data_ptr(), z.data_ptr(), address(mean), address(rstd), x.data_ptr()),
        *(parameters.ln_weight, parameters.ln_bias, parameters.weight, parameters.bias),
        *(x.numel() // features, outputs, features, eps, parameters.affine_is_float32),
    )
    return y, mean, rstd


def _make(parameters: Parameters, stream: int, fold: Fold) -> None:
    """Fold the parameters as they are now."""
    linear_weight = parameters.tensors()[2]
    if linear_weight.data_ptr() % ALIGNMENT:
        linear_weight = linear_weight.clone()
    outputs, features = parameters.outputs, parameters.features
    weight = torch.empty_like(linear_weight)
    sums = linear_weight.new_empty(2, outputs, dtype=torch.float32)
    fold.tensors = weight, sums
    fold.addresses = weight.data_ptr(), sums.data_ptr(), sums.data_ptr() + 4 * outputs
    kernels, launcher, _ = _launcher(parameters.dtype, parameters.device.index, stream, _is_alone())
    kernels.fold(
        launcher,
        *fold.addresses,
        *(linear_weight.data_ptr(), parameters.ln_weight, parameters.ln_bias, parameters.bias),
        *(outputs, features, True, parameters.affine_is_float32),
    )


class _Thread(threading.local):
    prepared: frozenset[int] = frozenset()


_thread = _Thread()


def _prepare_products(device: int, in_graph: bool) -> None:
    """Have PyTorch's products ready in this thread, before a graph that chooses them needs them.

    Their library cannot begin within a capture, and calls made to warm up may all choose ours.
    """
    if device not in _thread.prepared and not in_graph:
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()
        _thread.prepared |= {device}


def _may_use_tf32() -> bool:
    """Return whether PyTorch may multiply float32 in tf32, however it was told so.

    It may be told otherwise before the next call. `allow_tf32` raises an error where both of
    PyTorch's settings were used.
    """
    precision: str = torch._C._get_fp32_precision_getter("cuda", "matmul")
    return precision == "tf32"


def _is_alone() -> bool:
    """Return whether no collective, which waits for other GPUs, runs beside our kernels."""
    return not torch.distributed.is_initialized()


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _launcher(dtype: torch.dtype, device: int, stream: int, alone: bool) -> tuple[Any, int, Any]:
    """Return the kernels, the address of what they need to launch on a stream, and its owner.

    Where they are not `alone`, other kernels may hold multiprocessors for long.
    """
    kernels = _native.load(_extension(dtype))
    launcher = kernels.Launcher(device, stream, int(alone))
    return kernels, launcher.address(), launcher


def _extension(dtype: torch.dtype) -> _native.Extension:
    return _native.Extension("norm_linear_sm90", _native.DTYPES[dtype], "nvidia:sm_90a")
