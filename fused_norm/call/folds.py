"""Weights folded for Hopper: how long they are kept, and when they are out of date."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fused_norm.call.parameters import Parameters

# Of each parameter, its version and its storage.
_Versions = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Fold:
    """A weight made ready for one stream, and what its parameters' versions were.

    Attributes:
        versions: Of the parameters when they were last met, and where their memory was.
        memory: Refers weakly to that, so that no other has its place in `versions`.
        tensors: Wc `[N, K]`, and s and c `[2, N]` in float32; empty until the parameters come a
            second time.
        addresses: Of Wc, s and c.
        scratch: What calls on its stream write to and nobody reads: statistics not asked for.
    """

    versions: _Versions | None
    memory: tuple[StorageWeakRef, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    addresses: tuple[int, ...] = ()
    scratch: Tensor | None = None


@contextmanager
def frozen_parameters() -> Iterator[None]:
    """Promise not to change the weights, so that CUDA graphs captured inside read folded ones.

    Otherwise a captured call folds the weights in every replay, or takes another way, because they
    may have changed by then. Before the capture, call what is captured twice inside the context, as
    a warm-up does anyway. A parameter that changes afterwards has no effect on the graphs.
    """
    before = _state.promise
    _state.promise = before or next(_promises)
    try:
        yield
    finally:
        _state.promise = before


def promise() -> int:
    """Return the number of the promise that holds in this thread, 0 without one."""
    return _state.promise


class _State(threading.local):
    promise = 0


_state = _State()
_promises = itertools.count(1)


def kept(parameters: Parameters, stream: int, in_graph: bool) -> Fold | None:
    """Return the fold of parameters that a stream has met before as they are, None the first time.

    It has no tensors the first time, and the caller makes them. Folds are kept per stream, whose
    order makes them ready before their use. They are freed with the first of their parameters.

    Args:
        parameters: Of a call.
        stream: The call's.
        in_graph: Whether a CUDA graph captures the call.
    """
    versions = _versions(parameters)
    if in_graph:
        return _for_graph(parameters, versions) if _state.promise else None
    if not _state.promise and (versions is None or torch.distributed.is_initialized()):
        # Sharded training writes gathered parameters without counting a version.
        return None
    fold: Fold | None = parameters.folds.get(stream)
    if fold is None or fold.versions != versions:
        tensors = _tensors(parameters)
        memory = tuple(StorageWeakRef(t.untyped_storage()) for t in tensors)
        parameters.folds[stream] = Fold(versions, memory)
        return None
    return fold


def _for_graph(parameters: Parameters, versions: _Versions | None) -> Fold | None:
    """Return a fold that is ready, from whichever stream, and keep it for the graph."""
    for fold in parameters.folds.values():
        if fold.versions == versions and fold.tensors:
            # Keep it under a key no stream uses, so that replacing a stream's fold cannot free what
            # a graph reads.
            parameters.folds[-id(fold)] = fold
            ready: Fold = fold
            return ready
    return None


def _versions(parameters: Parameters) -> _Versions | None:
    """Return what changes whenever the parameters' values do, None where nothing tells.

    An assignment to their `data` changes no version, and may bring memory that was theirs before.
    """
    tensors = _tensors(parameters)
    try:
        return tuple([(t._version, t.untyped_storage()._cdata) for t in tensors])
    except RuntimeError:  # an inference tensor has no version: a promise stands for it
        if not _state.promise:
            return None
        return tuple(
            (-_state.promise if t.is_inference() else t._version, t.untyped_storage()._cdata)
            for t in tensors
        )


def _tensors(parameters: Parameters) -> list[Tensor]:
    return [t for t in parameters.tensors() if t is not None]
