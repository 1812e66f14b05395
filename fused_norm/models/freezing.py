"""Freezes the parameters of a compiled graph in inference: the backend's option `freeze`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fused_norm.call import frozen
from fused_norm.call.frozen import Frozen
from fused_norm.freeze import freeze_parameters


class FrozenRun:
    """Runs a graph, with its parameters frozen from the first run without gradients on.

    A run with gradients thaws them, wherever they were frozen, and so does `train()` of a module
    that owns one. The next run without gradients freezes them again.
    """

    def __init__(self, run: Callable[..., Any], module: GraphModule) -> None:
        self._run = run
        # If Inductor freezes, Dynamo gives the graph its parameters as attributes.
        self._own = list(module.parameters())
        self._places: list[int] | None = None
        # By the first parameter: all instances of a class share its graphs.
        self._records: dict[int, Callable[[], Frozen | None]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return the graph's results."""
        if self._places is None:
            self._places = [i for i, a in enumerate(arguments) if isinstance(a, nn.Parameter)]
        parameters = [arguments[place] for place in self._places] or self._own
        if torch.is_grad_enabled():
            for record in frozen.of(parameters):
                record.thaw()
        elif parameters:
            found = self._records.get(id(parameters[0]), _nothing)()
            if found is None or not found.is_alive:
                owners = _owners(parameters)
                made = freeze_parameters(parameters, owners)
                # Its owners hold it. A graph would hold the memory of models that are gone.
                self._records[id(parameters[0])] = weakref.ref(made) if owners else lambda: made
        return self._run(*arguments)


def _nothing() -> None:
    return None


def _owners(parameters: Sequence[nn.Parameter]) -> list[nn.Module]:
    """Return the modules that own parameters: a graph only knows their names."""
    tables = [table for table in gc.get_referrers(*parameters) if type(table) is dict]
    held = {id(table) for table in tables}
    found = {}
    for holder in gc.get_referrers(*tables) if tables else ():
        # An instance's attributes may be in a dictionary or inline.
        for each in (holder, *(gc.get_referrers(holder) if type(holder) is dict else ())):
            if isinstance(each, nn.Module) and id(vars(each).get("_parameters")) in held:
                found[id(each)] = each
    return list(found.values())
