"""What a provider is: someone who computes an op, and how a call of theirs is bound to inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.case import Case, Formula, Mode, Outputs
from benchmarks.environment import version

# Ratios are to the baseline and to the floor of the same run.
Role = Literal["baseline", "floor", "peer", "ours"]


class Bound(NamedTuple):
    """A call on one set of inputs.

    Attributes:
        call: Computes the outputs.
        leaves: The tensors whose gradients it computes, one for each of the op's inputs. What a
            formula does not use has no gradient.
    """

    call: Callable[[], Outputs]
    leaves: list[Tensor]


Bind = Callable[[list[Tensor]], Bound]


@dataclass(frozen=True)
class Provider:
    """Someone who computes an op.

    Attributes:
        name: What `--provider` calls it.
        op: Name of the op.
        role: What it is to the others.
        description: What runs.
        load: Imports what it needs and returns it. An ImportError says that it is not installed.
        prepare: Returns what binds it to inputs, from what was loaded and the case.
        packages: Distributions whose versions name it.
        refuse: Returns why it cannot serve a case, or None if it can.
        formula: What it computes, where that is less than the op.
        capturable: Whether its work goes to PyTorch's current stream, as CUDA graphs need.
        capture: Makes the context in which a CUDA graph of its calls is captured.
        modes: The modes that it differs from another provider in, None for all.
        only_on_request: Whether it is left out unless asked for, or the shape is the puzzle's.
    """

    name: str
    op: str
    role: Role
    description: str
    load: Callable[[], Any]
    prepare: Callable[[Any, Case], Bind]
    packages: tuple[str, ...] = ("torch",)
    refuse: Callable[[Case], str | None] = lambda case: None
    formula: Formula | None = None
    capturable: bool = True
    capture: Callable[[], AbstractContextManager[None]] = nullcontext
    modes: tuple[Mode, ...] | None = None
    only_on_request: bool = False

    def versions(self) -> str:
        """Return the versions of its packages."""
        return ", ".join(f"{name} {version(name)}".strip() for name in self.packages)


def imported(name: str, *modules: str) -> Callable[[], Any]:
    """Return a function that imports a name from the first of several modules that is there."""

    def load() -> Any:
        for module in modules[:-1]:
            try:
                return getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue
        loaded = importlib.import_module(modules[-1])
        if not hasattr(loaded, name):
            raise ImportError(f"{modules[-1]} has no {name}")
        return getattr(loaded, name)

    return load


def given(function: Formula) -> Callable[[], Formula]:
    """Return a function that returns what needs no import."""
    return lambda: function


def as_function(function: Formula, case: Case) -> Bind:
    """Bind a function that takes the op's inputs in their order."""
    return lambda inputs: Bound(partial(function, *inputs), inputs)


def through(call: Formula) -> Callable[[Any, Case], Bind]:
    """Bind a function that takes what was loaded, then the op's inputs in their order."""
    return lambda loaded, case: as_function(partial(call, loaded), case)


def compiled(mode: str | None) -> Callable[[Formula, Case], Bind]:
    """Compile again for each case: a limit on recompiling would silently end in eager."""

    def prepare(function: Formula, case: Case) -> Bind:
        fast = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
        return as_function(fast, case)

    return prepare


def compiled_by_us(options: dict[str, Any]) -> Callable[[Any, Case], Bind]:
    """Compile with our backend, which is handed over loaded."""

    def prepare(loaded: tuple[Any, Formula], case: Case) -> Bind:
        backend, function = loaded
        fast = torch.compile(
            function, backend=backend, options=dict(options), dynamic=False, fullgraph=True
        )
        return as_function(fast, case)

    return prepare


def needs_gpu(case: Case) -> str | None:
    """Refuse CPUs."""
    return None if case.device.type == "cuda" else "needs a GPU"
