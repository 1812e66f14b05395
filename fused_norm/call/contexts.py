"""Finds what froze a call's parameters; in contexts, calls freeze those that they see twice."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fused_norm.call.frozen import Frozen, count_context, holding, is_any, is_ordinary, of
from fused_norm.call.offload import Key, Keys, key_of


def find(tensors: Iterable[Tensor | None], *, meets: bool = True) -> tuple[Frozen, Keys] | None:
    """Return what froze all of a call's parameters, and their keys; None if nothing did.

    Args:
        tensors: The parameters, None for an absent one.
        meets: Whether a context counts this call: a backward may use parameters that were made for
            its forward alone.
    """
    if not is_any():
        return None
    given = tuple(tensors)
    if not all(t is None or is_ordinary(t) for t in given):
        return None
    before: Keys | None = None
    # Another thread may move values at the same time: then parameters get other keys.
    while (keys := tuple(None if t is None else key_of(t) for t in given)) != before:
        if found := holding(keys):
            return found, keys
        before = keys
    return _here.find(given, keys) if meets else None


def may_hold(tensors: Iterable[Tensor]) -> bool:
    """Return whether some of a call's parameters are frozen, or a context may freeze them."""
    if not is_any():
        return False
    return _here.frozen is not None or bool(of(t for t in tensors if is_ordinary(t)))


class Context:
    """Freezes the parameters that calls of this thread see twice in it; the outermost one counts.

    A parameter that is seen once may be made for one call, and gone after it.

    Args:
        parameters: Frozen from the start, for all threads.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._parameters = tuple(parameters)

    def __enter__(self) -> None:
        # One object may be entered twice, as by a function that calls itself.
        _here.depth += 1
        if _here.depth == 1:
            _here.frozen, _here.seen = Frozen(trains=True), {}
            count_context(1)
        assert _here.frozen is not None
        _here.frozen.admit(p for p in self._parameters if is_ordinary(p))

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1
        if not _here.depth:
            frozen, _here.frozen = _here.frozen, None
            count_context(-1)
            assert frozen is not None
            frozen.thaw()


class _Here(threading.local):
    """The contexts that a thread is in, and the keys of tensors that it has seen in them."""

    depth = 0
    frozen: Frozen | None = None
    seen: dict[Key, StorageWeakRef]

    def find(self, tensors: Sequence[Tensor | None], keys: Keys) -> tuple[Frozen, Keys] | None:
        if self.frozen is None:
            return None
        pairs = [(t, k) for t, k in zip(tensors, keys, strict=True) if t is not None and k]
        new = [(t, k) for t, k in pairs if not self._has_met(k)]
        for tensor, key in new:
            self.seen[key] = StorageWeakRef(tensor.untyped_storage())
        if new:
            return None
        self.frozen.admit(t for t, _ in pairs)
        return self.frozen, keys

    def _has_met(self, key: Key) -> bool:
        return key in self.seen and not self.seen[key].expired()


_here = _Here()
