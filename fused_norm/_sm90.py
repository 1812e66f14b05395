"""The fused way on Hopper: one GEMM on a folded weight, whose epilogue finishes the LayerNorm.

    y = rstd * (x Wc^T - mean * s) + c    Wc = (W * gamma) centred along K and rounded, s its row
                                          sums, c = b + W beta

So x is read once and its normalised rows never exist. The fold is made anew where the weights may
have changed, and kept for calls that no gradient follows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_norm import _gpu, _native
from fused_norm._memory import dense, empty_statistics, workspace
from fused_norm._parameters import Parameters

# A box of the copy engine starts at a multiple of 16 bytes, and so does every row.
ALIGNMENT = 16
# Below so many rows for each output, a fold costs more than it saves: docs/hopper-log.md.
ROWS_PER_OUTPUT = 2


@dataclass(slots=True)
class Fold:
    """A weight made ready for one stream, and what its parameters' versions were.

    Attributes:
        versions: Of the parameters when they were last met.
        weight: Wc `[N, K]`, None until the parameters come a second time.
        sums: s `[N]` and c `[N]` in float32.
    """

    versions: tuple[int, ...] | None
    weight: Tensor | None = None
    sums: Tensor | None = None


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
    x: Tensor, parameters: Parameters, eps: float, statistics: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y of shape `[..., N]`, and mean and rstd of shape `[...]` if asked for."""
    outputs, features = parameters.outputs, parameters.features
    rows = x.numel() // features
    device = parameters.device.index
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernels, launcher, _ = _launcher(x.dtype, device, stream)
    # Where a gradient follows, the parameters are about to change, and a fold kept is memory lost.
    fold = None if statistics else _kept_fold(parameters, stream)
    if fold is None:
        if rows < ROWS_PER_OUTPUT * outputs:
            return _gpu.forward(x, parameters, eps, statistics)
        fold = Fold(())
        _make(parameters, stream, fold)
    assert fold.weight is not None
    assert fold.sums is not None
    (x,) = dense(x)
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    y = x.new_empty(*x.shape[:-1], outputs)
    mean, rstd = empty_statistics(x) if statistics else (None, None)
    # The kernel writes them in any case.
    scratch = workspace(2 * 4 * rows, x.device) if mean is None else mean
    sums = fold.sums.data_ptr()
    kernels.forward(
        launcher,
        y.data_ptr(),
        scratch.data_ptr(),
        scratch.data_ptr() + 4 * rows if rstd is None else rstd.data_ptr(),
        x.data_ptr(),
        fold.weight.data_ptr(),
        sums,
        sums + 4 * outputs,
        rows,
        outputs,
        features,
        eps,
    )
    return y, mean, rstd


backward = _gpu.backward


@contextmanager
def frozen_parameters() -> Iterator[None]:
    """Take parameters as final, so that CUDA graphs captured within read their folded weights.

    A captured call otherwise folds the weights in every replay, or does without, because they may
    have changed by then. Call what is captured twice before, within as well, as a warm-up does
    anyway. A parameter that changes afterwards has no effect on the graphs.
    """
    before = _state.frozen
    _state.frozen = True
    try:
        yield
    finally:
        _state.frozen = before


class _State(threading.local):
    frozen = False


_state = _State()


def _kept_fold(parameters: Parameters, stream: int) -> Fold | None:
    """Return the fold of parameters that a stream meets again as they were, None at first sight.

    Folds are kept per stream, whose order makes them ready before their use. They go with the first
    of their tensors that does.
    """
    versions = _versions(parameters)
    if torch.cuda.is_current_stream_capturing():
        return _fold_for_graph(parameters, versions) if _state.frozen else None
    if not _state.frozen and (versions is None or torch.distributed.is_initialized()):
        # Sharded training writes gathered parameters without counting a version.
        return None
    fold: Fold | None = parameters.folds.get(stream)
    if fold is None or fold.versions != versions:
        parameters.folds[stream] = Fold(versions)
        return None
    if fold.weight is None:
        _make(parameters, stream, fold)
    return fold


def _fold_for_graph(parameters: Parameters, versions: tuple[int, ...] | None) -> Fold | None:
    """Return a fold that is ready, from whichever stream, and keep it for the graph."""
    for fold in parameters.folds.values():
        if fold.versions == versions and fold.weight is not None:
            # Under a key that no stream has, it stays when the stream gets another one.
            parameters.folds[-id(fold)] = fold
            return fold  # type: ignore[no-any-return]
    return None


def _make(parameters: Parameters, stream: int, fold: Fold) -> None:
    """Fold the parameters as they are now, into the memory that the fold has."""
    linear_weight = parameters.tensors()[2]
    if linear_weight.data_ptr() % ALIGNMENT:
        linear_weight = linear_weight.clone()
    outputs, features = parameters.outputs, parameters.features
    if fold.weight is None or fold.sums is None:
        fold.weight = torch.empty_like(linear_weight)
        fold.sums = linear_weight.new_empty(2, outputs, dtype=torch.float32)
    sums = fold.sums.data_ptr()
    kernels, launcher, _ = _launcher(parameters.dtype, parameters.device.index, stream)
    kernels.fold(
        launcher,
        *(fold.weight.data_ptr(), sums, sums + 4 * outputs),
        *(linear_weight.data_ptr(), parameters.ln_weight, parameters.ln_bias, parameters.bias),
        *(outputs, features, True, parameters.affine_is_float32),
    )


def _versions(parameters: Parameters) -> tuple[int, ...] | None:
    """Return what changes whenever the parameters' values do, None where nothing tells."""
    try:
        return tuple([t._version for t in parameters.tensors() if t is not None])
    except RuntimeError:  # an inference tensor has no version
        return None


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _launcher(dtype: torch.dtype, device: int, stream: int) -> tuple[Any, int, Any]:
    """Return the kernels, the address of what they need to launch on a stream, and its owner."""
    name = _native.DTYPES[dtype]
    kernels = _native.load(_native.Extension("layernorm_linear_sm90", name, "nvidia:sm_90a"))
    launcher = kernels.Launcher(device, stream)
    return kernels, launcher.address(), launcher
