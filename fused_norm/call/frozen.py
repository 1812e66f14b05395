"""Parameters that do not change for a while, and what kernels have prepared from them.

Nothing that a call makes outlives it, unless its parameters are frozen: then the first call that
wants a weight's fold makes it, and it is kept. Parameters are identified by their memory, which is
held so that nothing else can reuse it; a parameter with new memory is not frozen any more.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fused_norm.call.offload import Key, Keys, Offload, key_of
from fused_norm.call.prepared import Prepared, allocate

Found = TypeVar("Found")


@dataclass(eq=False)
class Frozen:
    """Parameters that do not change until they are thawed.

    Attributes:
        trains: Whether gradients may be computed meanwhile, as for several micro-batches.
        offload: The values that may leave the device once nothing needs them there.
        on_thaw: What else ends with this object.
    """

    trains: bool = False
    offload: Offload = field(default_factory=Offload)
    on_thaw: list[Callable[[], None]] = field(default_factory=list)
    _memory: dict[Key, torch.UntypedStorage] = field(default_factory=dict)
    _prepared: dict[Hashable, Prepared] = field(default_factory=dict)
    _found: dict[Hashable, tuple[tuple[Prepared, ...], Any]] = field(default_factory=dict)

    def admit(self, tensors: Iterable[Tensor]) -> None:
        """Freeze tensors, and let calls on them find this object."""
        with _lock:
            for tensor in tensors:
                key = key_of(tensor)
                if key not in self._memory:
                    self._memory[key] = tensor.untyped_storage()
                    _frozen.setdefault(key, []).append(weakref.ref(self))
            _tell()

    @property
    def is_alive(self) -> bool:
        """Return whether this has not been thawed."""
        return bool(self._memory)

    def holds(self, keys: Iterable[Key | None]) -> bool:
        """Return whether all parameters of a call are frozen by this."""
        return all(key is None or key in self._memory for key in keys)

    def prepared(
        self,
        name: Sequence[Hashable],
        keys: Keys,
        make: Callable[[], tuple[Tensor, ...]],
        device: torch.device,
        activation: int = 0,
    ) -> Prepared | None:
        """Return what was made from a call's parameters, for any stream to read; make it if needed.

        Values leave the device, if they may, once only what was made from them is needed.

        Args:
            name: What it is.
            keys: The parameters' keys.
            make: Makes it.
            device: The device of the parameters.
            activation: The number of the activation in the epilogue that it is for.

        Returns:
            What was made. None if it has not been made and cannot be now: a CUDA graph captures the
                call, values of the parameters have left the device, or should leave it and cannot.
                None too if the parameters are not frozen by this any more.
        """
        with self.offload.turn():
            # Another thread may have moved values since the caller computed the keys.
            keys = self.offload.current(keys)
            if not self.holds(keys):
                # Another thread has thawed it.
                return None
            stream, in_graph = 0, False
            if device.type == "cuda":
                stream = torch._C._cuda_getCurrentRawStream(device.index)
                in_graph = torch.cuda.is_current_stream_capturing()
            with _lock:
                found = self._prepared.get((*name, keys))
            if found is None:
                if in_graph or self.offload.has_any_of(keys) or self.offload.has_staying(keys):
                    return None
                tensors = allocate(make, device)
                if device.type == "cuda":
                    # After this, any stream may read it.
                    torch.cuda.current_stream(device).synchronize()
                made = Prepared(tensors, stream, activation=activation)
                with _lock:
                    # Another thread may have made it in the meantime.
                    found = self._prepared.setdefault((*name, keys), made)
            if device.type == "cuda":
                found.read_on(stream, in_graph)
            if not in_graph:
                self._offload(name, keys)
            return found

    def found(
        self,
        name: Sequence[Hashable],
        keys: Keys,
        of: tuple[Prepared, ...],
        find: Callable[[], Found],
    ) -> Found | None:
        """Return what was computed from a call's parameters and from what was made from some.

        Args:
            name: What it is.
            keys: The parameters' keys, which this object holds.
            of: What was made; what is found does not outlive any of it.
            find: Computes it, in the host's memory, and may synchronize with a device.

        Returns:
            What was found; None if it has not been computed and a CUDA graph captures the call.
        """
        key = (*name, keys)
        with _lock:
            made, result = self._found.get(key, ((), None))
        if len(made) == len(of) and all(map(operator.is_, made, of)):
            return cast(Found, result)
        if of[0].tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        result = find()
        with _lock:
            # Not if it has been thawed in the meantime.
            if self.holds(keys):
                self._found[key] = of, result
        return result

    def has_made(self, what: Hashable, key: Key) -> bool:
        """Return whether something was made from a parameter.

        Args:
            what: The first part of its name.
            key: The parameter's.
        """
        with _lock:
            names: list[Any] = [*self._prepared]
        return any(name[0] == what and key in name[-1] for name in names)

    def _offload(self, name: Sequence[Hashable], keys: Keys) -> None:
        """Move values from which something was made to the host's memory.

        NaN replaces them, in memory that all of them share.
        """
        leaving = self.offload.leaving(keys)
        if not leaving:
            return
        device = self.offload.candidates[leaving[0]].device
        if device.type == "cuda":
            # Other streams may still be reading them.
            torch.cuda.synchronize(device)
        with _lock:
            for key in leaving:
                # Other threads may see the parameter or its placeholder: both are frozen.
                self.admit([self.offload.stand_in(key)])
                self.offload.move(key)
                del self._memory[key]
                self._leave(key)
            before, after = (*name, keys), (*name, self.offload.current(keys))
            self._prepared[after] = self._prepared.pop(before)
            self.offload.end(leaving)

    def thaw(self) -> None:
        """End this: free what was made, and move offloaded values back to the device."""
        self.offload.bring_back()
        self._forget()
        while self.on_thaw:
            self.on_thaw.pop()()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit, the interpreter first clears the names of this module.
        if not is_finalizing():
            self._forget()

    def _forget(self) -> None:
        with _lock:
            for key in self._memory:
                self._leave(key)
            _captured[:] = [(of, made) for of, made in _captured if not of.expired()]
            for made in self._prepared.values():
                if made.is_captured:
                    # A graph that reads it also reads other memory of the model.
                    memory = next(iter(self._memory.values()))
                    _captured.append((StorageWeakRef(memory), made))
            self._memory.clear()
            self._prepared.clear()
            self._found.clear()
            _tell()

    def _leave(self, key: Key) -> None:
        left = [r for r in _frozen.get(key, ()) if r() not in (None, self)]
        if left:
            _frozen[key] = left
        else:
            _frozen.pop(key, None)


def is_ordinary(tensor: Any) -> bool:
    """Return whether a tensor has its own values in memory, by which it can be identified."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def holding(keys: Keys) -> Frozen | None:
    """Return what froze all of a call's parameters, None if nothing did.

    Args:
        keys: The parameters' keys, None for an absent one.
    """
    for key in keys:
        for reference in _frozen.get(key, ()) if key is not None else ():
            found = reference()
            if found is not None and found.holds(keys):
                return found
    return None


def of(tensors: Iterable[Tensor]) -> list[Frozen]:
    """Return everything that froze some of the tensors, without duplicates."""
    if not is_any():
        return []
    found: dict[int, Frozen] = {}
    for tensor in tensors:
        for reference in tuple(_frozen.get(key_of(tensor), ())):
            record = reference()
            if record is not None:
                found[id(record)] = record
    return list(found.values())


def require_values(tensors: Iterable[Tensor | None]) -> None:
    """Raise an error if values of a call's parameters have left the device.

    Args:
        tensors: The parameters, None for an absent one.

    Raises:
        RuntimeError: If they have: the call needs them, not only what was made from them.
    """
    if not has_offloaded():
        return
    # Contexts are not asked, since they freeze what they are asked for twice.
    for tensor in (t for t in tensors if t is not None and is_ordinary(t)):
        if any(record.offload.has_any_of([key_of(tensor)]) for record in of([tensor])):
            raise RuntimeError(
                "freeze(offload=True) moved a weight of this call to the host's memory, and the "
                "call needs it: run it under torch.no_grad() as the calls before, or unfreeze the "
                "model"
            )


def left_for(what: Hashable, tensor: Tensor) -> Tensor | None:
    """Return values of a parameter that have left for what was made from it, on the host.

    Args:
        what: The first part of its name.
        tensor: The parameter.

    Returns:
        None if they have not left, or for something else.
    """
    if not has_offloaded() or not is_ordinary(tensor):
        return None
    key = key_of(tensor)
    made = (record for record in of([tensor]) if record.has_made(what, key))
    return next((record.offload.values_of(key) for record in made), None)


def is_any() -> bool:
    """Return whether anything is frozen: otherwise a call need not ask."""
    return _level > 0


def has_offloaded() -> bool:
    """Return whether values of any parameter have left their device."""
    return _level > 1


def tell_changes(listener: Callable[[int], None]) -> None:
    """Tell a listener from now on whether anything is frozen (1), or also offloaded (2)."""
    with _lock:
        _listeners.append(listener)
        _tell()


def count_context(change: int) -> None:
    """Count contexts in which calls may freeze what they see: one more (1) or one fewer (-1)."""
    global _contexts
    with _lock:
        _contexts += change
        _tell()


def _tell() -> None:
    global _level
    references = [r for each in tuple(_frozen.values()) for r in each]
    records = [record for record in (r() for r in references) if record is not None]
    _level = 2 if any(record.offload.has_any() for record in records) else 1
    if not records and not _contexts:
        _level = 0
    for listener in _listeners:
        listener(_level)


_lock = threading.RLock()
_contexts = 0
# 1 if anything is frozen, 2 if values have left a device.
_level = 0
_frozen: dict[Key, list[weakref.ref[Frozen]]] = {}
# Kept for CUDA graphs, as long as the memory of the parameters, which these also read.
_captured: list[tuple[StorageWeakRef, Prepared]] = []
_listeners: list[Callable[[int], None]] = []
