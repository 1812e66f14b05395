"""The backend of torch.compile: it rewrites a graph and passes it on to another backend."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from fused_norm.models.caching import with_keys
from fused_norm.models.freezing import FrozenRun
from fused_norm.models.fuse import fuse
from fused_norm.models.settings import Settings, settings
from fused_norm.models.sites import Site
from fused_norm.ops.invariance import is_batch_invariant
from fused_norm.ops.operands import at_every_size

log = logging.getLogger("fused_norm.models")


def backend(
    module: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    sites: list[Site] | None = None,
) -> Callable[..., Any]:
    """Fuse the norms of a graph that Dynamo traced, and compile it with the next backend.

    `torch.compile(model, backend="fused_norm")` calls this function.

    Args:
        module: The graph.
        example_inputs: Its inputs, as fake tensors.
        mode: A mode of `torch.compile`, for Inductor.
        options: `then`: what compiles the rewritten graph: `"inductor"` (the default), `"eager"` to
            run it as it is, or the name of another backend. `rounding`: `"once"` (the default)
            computes norm, modulation and activation in float32 and rounds once; `"model"` rounds
            wherever the model does. `small`: whether to fuse calls that PyTorch finishes before
            Python has started ours. Before Inductor, the default is no, except in CUDA graphs, and
            if the products of the graph keep a GPU busy for longer than Python needs for its
            norms. `fp8`: a recipe of `norm_linear` for the Linear layers; by default that of
            `autocast_fp8`, if the model is compiled inside. `skip`: the layers that stay out of
            FP8, by the end of their paths or by patterns; layers with features or outputs below
            1024, or not a multiple of 16, always do. `freeze`: whether to freeze the parameters of
            runs without gradients, as `fused_norm.freeze` does; by default as Inductor's
            `freezing`. All other options are those of the next backend.
        sites: A list that receives what became of each norm.

    Returns:
        A function that computes the graph.

    Raises:
        ValueError: If an option is unknown (the message names the closest known one), or a value
            is wrong.
    """
    chosen = settings(options, mode)
    nodes = nodes_of(module)
    found = fuse(module, chosen.fusing)
    if sites is not None:
        sites += found
    for site in found:
        log.info(
            "%s %s: %s", site.kind, site.path, "; ".join(site.calls) if site.fused else site.reason
        )
    run = compiled_next(module, example_inputs, chosen)
    # Nodes, including removed ones, hold their traced values, which refer weakly to the parameters;
    # PyTorch cannot swap parameters that have weak references.
    for node in (*nodes, *nodes_of(module)):
        node.meta.pop("example_value", None)
    if chosen.freezes:
        run = FrozenRun(run, module)
    return _in_its_mode(run)


def compiled_next(
    module: GraphModule, example_inputs: list[Any], chosen: Settings
) -> Callable[..., Any]:
    """Return a function that runs a graph, compiled by the next backend.

    Args:
        module: The graph.
        example_inputs: Its inputs.
        chosen: The settings.
    """
    if chosen.then == "eager":
        return at_every_size()(module.forward) if chosen.fusing.small else module.forward
    from torch._dynamo.backends.registry import lookup_backend

    following: Any = lookup_backend(chosen.then)
    compiled: Callable[..., Any]
    if chosen.then == "inductor":
        patches = with_keys(chosen.following, nodes_of(module), example_inputs)
        compiled = following(module, example_inputs, config_patches=patches)
    else:
        compiled = following(module, example_inputs, **chosen.following)
    return compiled


def nodes_of(module: GraphModule) -> list[Node]:
    """Return the nodes of a graph and of its checkpoints' graphs."""
    graphs = [each.graph for each in module.modules() if isinstance(each, GraphModule)]
    return [node for graph in graphs for node in graph.nodes]


def _in_its_mode(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a graph's function, kept out of batch_invariant() if it was compiled outside.

    Tracing decided whether calls are in that mode, and no guard checks it again: a model does not
    refer to the mode.
    """
    if is_batch_invariant():
        return run

    @functools.wraps(run)
    def checked(*arguments: Any) -> Any:
        if is_batch_invariant():
            raise RuntimeError(
                "this model was compiled outside of batch_invariant(): compile it inside, that is "
                "call it there first, and call torch.compiler.reset() before if need be"
            )
        return run(*arguments)

    return checked
