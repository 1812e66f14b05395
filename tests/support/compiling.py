"""What tests of PyTorch's compiler share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from fused_norm.models import Site, backend

# PyTorch's compiler, exporter and forward mode trip over these deprecations and hints of its own:
# from Python 3.14 on, `torch.jit.script` is "not supported" instead of "deprecated".
ITS_OWN_WARNINGS = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def with_sites(
    function: Callable[..., Any],
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> tuple[Any, list[Site]]:
    """Return a function compiled again by the backend, and the list of what becomes of its norms.

    Args:
        function: A function or a module.
        fullgraph: Whether one graph has to take all of it.
        dynamic: Whether sizes may vary; PyTorch's default if None.
        options: Options of the backend; `then` is `"eager"` unless it is given.
    """
    torch._dynamo.reset()
    sites: list[Site] = []
    how = functools.partial(backend, options={"then": "eager", **options}, sites=sites)
    return torch.compile(function, backend=how, fullgraph=fullgraph, dynamic=dynamic), sites


def assert_one_compile(
    function: Callable[..., Any], check: Callable[[Callable[..., Any], int], None]
) -> None:
    """Compile a function once for any number of rows.

    Args:
        function: What to compile.
        check: Calls the compiled function with this many rows, and checks the results.
    """
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for rows in (4, 6, 33, 100):
        check(compiled, rows)
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1
