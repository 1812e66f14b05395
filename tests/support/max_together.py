"""One compile for all of a library's ops that tests call: any takes MAX 20 s, whatever is in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from max.experimental.torch import CustomOpLibrary, torch
from max.graph import Graph, Module


class _Later:
    """A stand-in for a model in an op's cache."""

    def __init__(self, graph: Graph, models: dict[str, Any]) -> None:
        self.graph, self.models = graph, models

    def execute(self, *buffers: Any) -> None:
        """Run the model; do nothing while there is none."""
        if self.models:
            self.models[self.graph.name].execute(*buffers)


def compile_together(library: CustomOpLibrary, calls: Iterable[Callable[[], object]]) -> None:
    """Compile the ops of calls, which leave their results unwritten.

    Later calls of the same sizes run the op as the library would have compiled it. The graphs are
    those that it makes itself; MAX has no other way to hand it what was compiled.
    """
    models: dict[str, Any] = {}
    made: list[Graph] = []

    def load(graph: Graph) -> _Later:
        made.append(graph)
        return _Later(graph, models)

    session = library._session
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Graph", functools.partial(Graph, module=Module()))
        patch.setattr(session, "load", load)
        for call in calls:
            call()
    # Each is compiled with all of its module.
    models.update(session.load_all(made[-1]))
    assert models.keys() == {graph.name for graph in made}
