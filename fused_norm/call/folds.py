"""Weights folded for Hopper: how long they are kept, and when they are out of date."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_norm.call.parameters import Parameters


@dataclass(slots=True)
class Fold:
    """A weight made ready for one stream, and what its parameters' versions were.

    Attributes:
        versions: Of the parameters when they were last met.
        tensors: Wc `[N, K]`, and s and c `[2, N]` in float32; empty until the parameters come a
            second time.
        addresses: Of Wc, s and c.
        scratch: What calls on its stream write to and nobody reads: statistics not asked for.
    """

    versions: tuple[int, ...] | None
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
    before = _state.frozen
    _state.frozen = True
    try:
        yield
    finally:
        _state.frozen = before


class _State(threading.local):
    frozen = False


_state = _State()


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
        return _for_graph(parameters, versions) if _state.frozen else None
    if not _state.frozen and (versions is None or torch.distributed.is_initialized()):
        # Sharded training writes gathered parameters without counting a version.
        return None
    fold: Fold | None = parameters.folds.get(stream)
    if fold is None or fold.versions != versions:
        parameters.folds[stream] = Fold(versions)
        return None
    return fold


def _for_graph(parameters: Parameters, versions: tuple[int, ...] | None) -> Fold | None:
    """Return a fold that is ready, from whichever stream, and keep it for the graph."""
    for fold in parameters.folds.values():
        if fold.versions == versions and fold.tensors:
            # Keep it under a key no stream uses, so that replacing a stream's fold cannot free what
            # a graph reads.
            parameters.folds[-id(fold)] = fold
            ready: Fold = fold
            return ready
    return None


def _versions(parameters: Parameters) -> tuple[int, ...] | None:
    """Return what changes whenever the parameters' values do, None where nothing tells."""
    try:
        return tuple([t._version for t in parameters.tensors() if t is not None])
    except RuntimeError:  # an inference tensor has no version
        return None
