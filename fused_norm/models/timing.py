"""Times what a pass added to a graph against what it replaced, on inputs of the same sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fused_norm.models.flow import Flow
from fused_norm.models.sites import Site
from fused_norm.models.values import value
from fused_norm.ops.operands import hint

# Each sample takes at least this many seconds, so that the clock's overhead does not matter.
_SAMPLE = 1e-3
_ROUNDS = 9


@dataclass
class Replaced:
    """A part of a graph, and its replacement.

    Attributes:
        site: What became of it.
        before: The part, with its inputs as arguments.
        after: The replacement, with the same inputs.
        inputs: The values of those inputs: fake tensors, numbers.
        autocast: Enters the autocast that is active in the graph.
    """

    site: Site
    before: GraphModule
    after: GraphModule
    inputs: list[Any]
    autocast: Callable[[], AbstractContextManager[None]]


def cut_out(
    flow: Flow, dead: Iterable[Node], made: Sequence[Node], swaps: Sequence[tuple[Node, Node]]
) -> Replaced:
    """Return copies of nodes and of their replacements, before they are swapped.

    Args:
        flow: What is known of their graph.
        dead: Nodes that are removed if nothing else reads them.
        made: Their replacements, in the order of the graph.
        swaps: Results of the first, each with its replacement.
    """
    results = {old for old, _ in swaps}
    gone: set[Node] = set()
    for node in sorted(dead, reverse=True):
        if node in results or all(user in gone for user in node.users):
            gone.add(node)
    old, new = sorted(gone), sorted(made)
    inner = {*old, *new}
    inputs = list(dict.fromkeys(v for n in (*old, *new) for v in n.all_input_nodes))
    inputs = [node for node in inputs if node not in inner]
    before = _copied(old, inputs, [old for old, _ in swaps])
    after = _copied(new, inputs, [new for _, new in swaps])
    values = [value(node) for node in inputs]
    return Replaced(Site("", ""), before, after, values, partial(flow.autocast, new[0]))


def _copied(nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    graph = Graph()
    known = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    for node in nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in results))
    return GraphModule(torch.nn.Module(), graph)


def measure(
    replaced: Replaced, compile_: Callable[[GraphModule, list[Any]], Callable[..., Any]]
) -> None:
    """Time both, alternating, and store the medians in seconds in their site.

    If gradients are recorded, a sample is a forward and a backward.

    Args:
        replaced: What to time.
        compile_: Returns a function that runs a graph on some inputs.
    """
    inputs = [_made(each) for each in replaced.inputs]
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    if not torch.is_grad_enabled():
        leaves = []
    devices = {each.device for each in inputs if isinstance(each, Tensor)}
    device = next((d for d in devices if d.type != "cpu"), None)
    with replaced.autocast():
        graphs = (replaced.before, replaced.after)
        times = in_turns([_run(compile_(g, inputs), inputs, leaves) for g in graphs], device)
    replaced.site.seconds_before, replaced.site.seconds_after = times


def _made(like: Any) -> Any:
    """Return a value for a fake input: a tensor of random numbers, or zeros for indices."""
    if not isinstance(like, Tensor):
        return hint(like) if isinstance(like, torch.SymInt) else like
    sizes = [hint(size) for size in like.shape]
    strides = [hint(stride) for stride in like.stride()]
    made = torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
    made = made.normal_() if like.is_floating_point() else made.zero_()
    return made.requires_grad_(like.requires_grad and made.is_floating_point())


def _run(
    run: Callable[..., Any], inputs: Sequence[Any], leaves: Sequence[Tensor]
) -> Callable[[], Any]:
    def forward() -> Any:
        return [y for y in run(*inputs) if isinstance(y, Tensor)]

    def step() -> None:
        ys = [y for y in forward() if y.requires_grad]
        torch.autograd.grad(ys, leaves, [torch.ones_like(y) for y in ys], allow_unused=True)

    follows = leaves and any(y.requires_grad for y in forward())
    return step if follows else forward


def in_turns(runs: Sequence[Callable[[], Any]], device: torch.device | None) -> list[float]:
    """Return the median seconds of a call of each, alternating between them.

    Args:
        runs: The functions to time.
        device: The device of the work, None for the host.
    """

    def sample(run: Callable[[], Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if device is not None:
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / calls

    counts = [max(1, round(_SAMPLE / min(sample(run, 1) for _ in range(3)))) for run in runs]
    samples = [[sample(*each) for each in zip(runs, counts, strict=True)] for _ in range(_ROUNDS)]
    return [statistics.median(each) for each in zip(*samples, strict=True)]
