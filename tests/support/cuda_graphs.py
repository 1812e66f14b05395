"""Calls that a CUDA graph captures, on rows that are written before a replay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def replayed(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    first: Callable[[Tensor], object] | None = None,
    times: int = 1,
) -> Tensor:
    """Return what a CUDA graph of a call computes on rows that it did not capture.

    Args:
        run: The call.
        x: The rows.
        first: What precedes the graph on its stream, as a graph may not capture what loads kernels;
            None for the call.
        times: How often the graph is replayed.
    """
    stream, held = torch.cuda.Stream(), torch.zeros_like(x)
    with torch.cuda.stream(stream):
        (first or run)(held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = run(held)
        held.copy_(x)
        for _ in range(times):
            graph.replay()
        stream.synchronize()
    return y


def assert_same_in_graphs_and_after_writes(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare calls in CUDA graphs, and on rows that are written just before and after them.

    Args:
        run: The call.
        x: The rows.
    """
    expected = run(x)
    for _ in range(20):
        late = torch.zeros_like(x)
        torch.cuda._sleep(100_000)
        late.copy_(x)
        found = run(late)
        late.fill_(float("nan"))
        assert torch.equal(found, expected)
    assert torch.equal(replayed(run, x, times=3), expected)
