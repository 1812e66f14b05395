"""Parameters whose values have left the device: the host has them, and NaN replaces them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fused_norm.call.prepared import allocate

# More weights of one dtype than any model has.
_STAND_INS = 4096
# Identifies a tensor: its memory, and how it is read.
Key = tuple[Any, ...]
# Identifies the parameters of a call, None for an absent one.
Keys = tuple["Key | None", ...]


def key_of(tensor: Tensor) -> Key:
    """Return what identifies a tensor, as long as its memory is held."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(slots=True)
class _Away:
    """A parameter whose values are in the host's memory."""

    parameter: Tensor
    device: torch.device
    values: Tensor


@dataclass(eq=False)
class Offload:
    """Parameters whose values may leave their device, and those whose values have left it.

    Attributes:
        candidates: Parameters that may leave.
        staying: Keys of weights that may not: what was made from them would take extra memory.
    """

    candidates: dict[Key | None, Tensor] = field(default_factory=dict)
    staying: set[Key] = field(default_factory=set)
    _away: dict[Key, _Away] = field(default_factory=dict)
    # The current key of each parameter that has moved, by its earlier key.
    _moved: dict[Key | None, Key] = field(default_factory=dict)
    _stand_ins: dict[Key | None, Tensor] = field(default_factory=dict)
    _nan: dict[Any, tuple[Tensor, int]] = field(default_factory=dict)
    _turn: threading.RLock = field(default_factory=threading.RLock)

    def turn(self) -> AbstractContextManager[Any]:
        """Return a lock that serializes calls of several threads, as long as values may leave.

        Otherwise one thread could read the placeholder of a value that another has just moved.
        """
        return self._turn if self.candidates else contextlib.nullcontext()

    def may_have_any(self) -> bool:
        """Return whether values of any parameter have left, or may leave at any time."""
        return bool(self._away or self.candidates)

    def has_any(self) -> bool:
        """Return whether values of any parameter have left."""
        return bool(self._away)

    def has_any_of(self, keys: Iterable[Key | None]) -> bool:
        """Return whether values of a call's parameters have left."""
        return any(key in self._away or key in self._moved for key in keys if key is not None)

    def values_of(self, key: Key) -> Tensor | None:
        """Return values that have left, as they are in the host's memory; None of others.

        Args:
            key: Of the placeholder.
        """
        away = self._away.get(key)
        return None if away is None else away.values

    def has_staying(self, keys: Iterable[Key | None]) -> bool:
        """Return whether any of a call's weights has to stay."""
        return not self.staying.isdisjoint(keys)

    def current(self, keys: Keys) -> Keys:
        """Return the current keys of parameters, whenever their keys were computed."""
        return tuple(self._moved.get(key, key) for key in keys)

    def leaving(self, keys: Keys) -> list[Key]:
        """Return the keys of a call's parameters that may leave."""
        return [key for key in keys if key is not None and key in self.candidates]

    def stand_in(self, key: Key) -> Tensor:
        """Return a placeholder for a parameter, whose values are on the host from here on.

        Args:
            key: Of a parameter that may leave.
        """
        parameter = self.candidates[key]
        found = self._nan_like(parameter)
        self._away[key_of(found)] = _Away(parameter, parameter.device, parameter.detach().cpu())
        self._moved[key] = key_of(found)
        self._stand_ins[key] = found
        return found

    def move(self, key: Key) -> None:
        """Replace the values with the placeholder, which frees their memory on the device."""
        self.candidates[key].data = self._stand_ins.pop(key)

    def end(self, keys: Iterable[Key]) -> None:
        """Let calls of these parameters run concurrently again: until then, other threads wait."""
        for key in keys:
            del self.candidates[key]

    def bring_back(self) -> None:
        """Move all values back, and let none leave any more."""
        with self._turn:
            for key, each in self._away.items():
                # Not where the user has given a parameter other memory.
                if key_of(each.parameter) == key:
                    each.parameter.data = each.values.to(each.device)
            self._away.clear()
            self._moved.clear()
            self._nan.clear()
            self.candidates.clear()

    def _nan_like(self, parameter: Tensor) -> Tensor:
        """Return a NaN tensor shaped like a parameter, at its own offset in shared memory."""
        place, size = (parameter.device, parameter.dtype), parameter.numel()
        # The alignment of loads of 16 bytes.
        step = max(16 // parameter.element_size(), 1)
        memory, used = self._nan.get(place, (None, 0))
        if memory is None or memory.numel() < used + size:
            like, whole = parameter.detach(), size + _STAND_INS * step
            (memory,) = allocate(lambda: (like.new_full((whole,), float("nan")),), like.device)
            used = 0
        self._nan[place] = memory, used + step
        return memory[used : used + size].view(parameter.shape)
