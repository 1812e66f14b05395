"""The fused way on Hopper: one GEMM on a folded weight, whose epilogue finishes the LayerNorm.

    y = rstd * (x Wc^T - mean * s) + c    Wc = (W * gamma) centred along K and rounded, s its row
                                          sums, c = b + W beta

So x is read once and its normalised rows never exist. The fold is made anew where the weights may
have changed, and kept for calls that no gradient follows.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_norm import _gpu, _native
from fused_norm._memory import address, affine_is_float32, dense, empty_statistics, workspace

# A box of the copy engine starts at a multiple of 16 bytes, and so does every row.
ALIGNMENT = 16
# Below so many rows for each output, a fold costs more than it saves: docs/hopper-log.md.
ROWS_PER_OUTPUT = 2


Parameters = tuple[Tensor | None, ...]


class Fold(NamedTuple):
    """A weight made ready: Wc `[N, K]`, s and c `[N]` in float32, all on one stream."""

    weight: Tensor
    sums: Tensor
    offsets: Tensor


def serves(x: Tensor, linear_weight: Tensor) -> bool:
    """Return whether the kernels can take a call.

    Args:
        x: Input of shape `[..., K]` on a GPU.
        linear_weight: Weight of shape `[N, K]`.
    """
    if x.dtype is not torch.bfloat16 or not _is_hopper(x.device.index):
        return False
    outputs, features = linear_weight.shape
    return not (outputs % 8 or features % 8)


def forward(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
    statistics: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y of shape `[..., N]`, and mean and rstd of shape `[...]` if asked for."""
    parameters = (ln_weight, ln_bias, linear_weight, linear_bias)
    outputs, features = linear_weight.shape
    rows = x.numel() // features
    device, stream = x.device.index, torch._C._cuda_getCurrentRawStream(x.device.index)
    launcher = _launcher(x.dtype, device, stream)
    # Where a gradient follows, the parameters are about to change, and a fold kept is memory lost.
    entry = None if statistics else _entry(parameters, stream)
    if entry is None and rows < ROWS_PER_OUTPUT * outputs:
        return _gpu.forward(x, *parameters, eps, statistics)
    fold = entry.fold if entry is not None else None
    if fold is None:
        fold = _fold(launcher, *parameters)
        if entry is not None:
            entry.fold = fold
    (x,) = dense(x)
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    y = x.new_empty(*x.shape[:-1], outputs)
    mean, rstd = empty_statistics(x) if statistics else (None, None)
    # The kernel writes them in any case.
    scratch = workspace(2 * 4 * rows, x.device) if mean is None else mean
    launcher.forward(
        y.data_ptr(),
        scratch.data_ptr(),
        scratch.data_ptr() + 4 * rows if rstd is None else rstd.data_ptr(),
        x.data_ptr(),
        fold.weight.data_ptr(),
        fold.sums.data_ptr(),
        fold.offsets.data_ptr(),
        rows,
        outputs,
        features,
        eps,
    )
    return y, mean, rstd


backward = _gpu.backward


def _fold(
    launcher: Any,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
) -> Fold:
    ln_weight, ln_bias, linear_weight, linear_bias = dense(
        ln_weight, ln_bias, linear_weight, linear_bias
    )
    if linear_weight.data_ptr() % ALIGNMENT:
        linear_weight = linear_weight.clone()
    outputs, features = linear_weight.shape
    sums = linear_weight.new_empty(2, outputs, dtype=torch.float32)
    fold = Fold(torch.empty_like(linear_weight), sums[0], sums[1])
    launcher.fold(
        fold.weight.data_ptr(),
        fold.sums.data_ptr(),
        fold.offsets.data_ptr(),
        linear_weight.data_ptr(),
        address(ln_weight),
        address(ln_bias),
        address(linear_bias),
        outputs,
        features,
        True,
        affine_is_float32(ln_weight, ln_bias),
    )
    return fold


class _Entry:
    """The parameters of a call as they were, and their fold once they came a second time."""

    def __init__(self, parameters: Parameters, versions: tuple[int, ...], forget: Any) -> None:
        self.references = [_nothing if t is None else weakref.ref(t, forget) for t in parameters]
        self.versions = versions
        self.fold: Fold | None = None

    def holds(self, parameters: Parameters, versions: tuple[int, ...]) -> bool:
        for reference, tensor in zip(self.references, parameters, strict=True):
            if reference() is not tensor:
                return False
        return self.versions == versions


def _nothing() -> None:
    """Stand in for the reference to a parameter that is None."""


_entries: dict[tuple[int, int], _Entry] = {}


def _versions(parameters: Parameters) -> tuple[int, ...] | None:
    """Return what changes whenever the parameters' values do, None where nothing tells."""
    versions: list[int] = []
    try:
        for tensor in parameters:
            if tensor is not None:
                versions += (tensor._version, tensor.data_ptr())
    except RuntimeError:  # an inference tensor has no version
        return None
    return tuple(versions)


def _entry(parameters: Parameters, stream: int) -> _Entry | None:
    """Return the entry of parameters that a stream has met before, as they are now.

    Entries are made per stream, whose order makes the fold ready before its use. They go with the
    first of their tensors that does.
    """
    versions = _versions(parameters)
    if versions is None or torch.cuda.is_current_stream_capturing():
        # A graph will be replayed when the parameters may be others.
        return None
    key = (id(parameters[2]), stream)
    entry = _entries.get(key)
    if entry is not None and entry.holds(parameters, versions):
        return entry
    _entries[key] = _Entry(parameters, versions, lambda _: _entries.pop(key, None))
    return None


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _launcher(dtype: torch.dtype, device: int, stream: int) -> Any:
    name = _native.DTYPES[dtype]
    extension = _native.Extension("layernorm_linear_sm90", name, "nvidia:sm_90a")
    return _native.load(extension).Launcher(device, stream)
