"""Other libraries' FP8 Linear layers, normalized to one form: our calls in the same recipe.

torchao's `convert_to_float8_training` leaves a node of its own in a graph, its configuration
written out as nodes; its `quantize_` leaves `F.linear` and a weight that is a tensor subclass.
torchao is never imported: its functions, configurations and weights are recognized by name.
`float8_transformers` handles the layers of transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fused_norm import recipes
from fused_norm.models import float8_transformers
from fused_norm.models.calls import Left
from fused_norm.models.emit import Emitter
from fused_norm.models.flow import Flow
from fused_norm.models.forms import above, form, is_plain_sum, only_user, other
from fused_norm.models.norms import module_path
from fused_norm.models.precision import in_fp8, unsuited
from fused_norm.models.sites import LINEAR, Site
from fused_norm.models.values import (
    are_laid_out_alike,
    dtype,
    is_plain,
    is_tensor,
    is_vector,
    shape,
    value,
)
from fused_norm.ops import quantized
from fused_norm.ops.eight_bits import serves
from fused_norm.ops.fp8 import scaled_linear
from fused_norm.ops.invariance import is_batch_invariant
from fused_norm.recipes import Cast, Recipe

_SCALINGS = {"axiswise": "row", "tensorwise": "tensor"}


class _Layer(NamedTuple):
    """A Linear layer in FP8.

    Attributes:
        node: The node that multiplies.
        out: The node of its result, after a bias if there is one.
        x: Its input.
        weight: Of shape `[N, K]`.
        bias: Of shape `[N]`, or None.
        recipe: One of RECIPES.
        inner: Nodes before it that nothing needs after its removal.
    """

    node: Node
    out: Node
    x: Node
    weight: Node
    bias: Any
    recipe: str
    inner: frozenset[Node] = frozenset()


def as_scaled_linears(emitter: Emitter, keeps_rounding: bool) -> list[Site]:
    """Emit a call of `scaled_linear` for each layer that it can replace; return the other layers.

    Args:
        emitter: Adds nodes to the graph.
        keeps_rounding: Whether a result is rounded before a bias is added, as torchao does.
    """
    left: list[Site] = []
    flow = emitter.flow
    if is_batch_invariant():
        return left
    for node in list(emitter.graph.nodes):
        f = form(node)
        whose, count = "torchao", len(emitter.made)
        try:
            if f.kind == "linear" and quantized.is_quantized(value(f["weight"])):
                layer = _inference(node, flow)
            elif _is_trained(node):
                layer = _trained(node, flow, keeps_rounding)
            elif float8_transformers.is_product(node):
                whose = "transformers"
                layer = _of_transformers(node, emitter)
            else:
                continue
            _put(layer, emitter)
        except (Left, NotImplementedError) as reason:
            emitter.forget(count)
            x: Any = node.args[0]
            site = _site(node, x)
            site.reason = f"left to {whose}: {reason}"
            left.append(site)
    return left


def lone_layers(graph: Graph) -> list[Site]:
    """Return the sites of the layers that are not part of another call.

    Args:
        graph: A graph whose norms have been rewritten.
    """
    lone = [node for node in graph.nodes if form(node).kind == "scaled_linear"]
    return [in_fp8(_site(node, form(node)["input"]), form(node)["recipe"]) for node in lone]


def _site(node: Node, x: Node) -> Site:
    return Site(module_path(node), LINEAR, linears=1).describe(value(x))


def _is_trained(node: Node) -> bool:
    """Return whether a node is the product of torchao's `Float8Linear`."""
    is_call = node.op == "call_function" and len(node.args) == 4 and is_tensor(node)
    return is_call and quantized.is_product(node.target)


def _trained(node: Node, flow: Flow, keeps_rounding: bool) -> _Layer:
    """Return the layer of a product of `Float8Linear`, with the bias that is added after it.

    Raises:
        Left: If we have no such recipe, or a call would not compute the same.
    """
    x, turned, _, config = node.args
    try:
        recipe = _recipe(_constant(config))
    except (AttributeError, KeyError, TypeError) as error:
        raise Left(f"a configuration of another torchao: {error}") from error
    f = form(turned)
    weight = f["input"]
    if f.kind not in ("t", "transpose") or not is_tensor(weight):
        raise Left("a weight that is no transposed parameter")
    assert isinstance(x, Node)
    assert isinstance(turned, Node)
    if not dtype(x) is dtype(weight) is dtype(node):
        raise Left(f"{dtype(x)} by {dtype(weight)} is {dtype(node)}")
    if recipe.power_of_two and not value(weight).requires_grad:
        raise Left("scales are powers of two, which ours are where the weight takes a gradient")
    _require_suited(x, weight, recipe.name)
    if quantized.is_gathered(value(weight)) and quantized.recipe_of(value(weight)) != recipe.name:
        raise Left(f"a weight that is gathered in FP8 with one scale, and not for {recipe.name}")
    if flow.is_written([weight], turned, node):
        raise Left("the weight is written")
    layer = _Layer(node, node, x, weight, None, recipe.name)
    total = only_user(node)
    if keeps_rounding or total is None or not is_plain_sum(total):
        return layer
    bias = above(other(total, node), casts=False)
    is_bias = is_vector(bias, shape(node)[-1]) and dtype(bias) is dtype(total) is dtype(node)
    is_same = flow.are_under_same_modes([node, total]) and is_plain(value(bias))
    if not is_bias or not is_same or flow.is_written([x, weight, bias], node, total):
        return layer
    return layer._replace(out=total, bias=bias)


def _inference(node: Node, flow: Flow) -> _Layer:
    """Return the layer whose weight `quantize_` made.

    Raises:
        Left: If a call would not compute the same.
        NotImplementedError: If the weight's form is not supported.
    """
    f = form(node)
    x, weight, bias = f["input"], f["weight"], f["bias"]
    recipe = quantized.recipe_of(value(weight))
    if not dtype(x) is dtype(weight) is dtype(node):
        raise Left(f"{dtype(x)} by {dtype(weight)} is {dtype(node)}")
    _require_no_gradient(node, flow, (x, weight, bias))
    _require_bias(node, x, bias)
    _require_suited(x, weight, recipe)
    return _Layer(node, node, x, weight, bias, recipe)


def _of_transformers(node: Node, emitter: Emitter) -> _Layer:
    """Return an FP8 Linear layer of transformers; emit its combined weight next to its inputs.

    Raises:
        Left: If a call would not compute the same.
    """
    graph, flow = emitter.graph, emitter.flow
    found = float8_transformers.parts(node)
    x, bias = found.x, found.bias
    if dtype(x) is not dtype(node):
        raise Left(f"{dtype(x)} becomes {dtype(node)}")
    _require_no_gradient(node, flow, (x, found.qdata, bias))
    _require_bias(node, x, bias)
    _require_suited(x, found.qdata, found.recipe)
    held = [found.qdata, found.scale]
    start = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    if max(held) > start:
        raise Left("a weight that is no input of the graph")
    if flow.is_written(held, start):
        raise Left("the weight is written")
    with graph.inserting_before(start):
        arguments = (*held, found.recipe, dtype(x))
        weight = emitter.emit(start, quantized.scaled_weight, *arguments)
    return _Layer(node, node, x, weight, bias, found.recipe, frozenset(found.inner))


def _require_no_gradient(node: Node, flow: Flow, operands: Sequence[Any]) -> None:
    takes_gradient = any(is_tensor(v) and value(v).requires_grad for v in operands)
    if takes_gradient and flow.records_gradients(node):
        raise Left("a gradient flows through a weight that has none")


def _require_bias(node: Node, x: Node, bias: Any) -> None:
    if is_tensor(bias) and not (is_vector(bias, shape(node)[-1]) and dtype(bias) is dtype(x)):
        raise Left("a bias of another shape or dtype")


def _require_suited(x: Node, weight: Node, recipe: str) -> None:
    tensor, rows = value(weight), value(x)
    if reason := unsuited(tensor):
        raise Left(reason)
    if quantized.is_to_gather(tensor):
        raise Left("a weight for FSDP2 to gather in FP8, of a model that is not sharded")
    if not is_plain(rows) or not (is_plain(tensor) or quantized.is_in_8_bits(tensor)):
        raise Left("a tensor of a kind of its own")
    how = recipes.find(recipe)
    is_served = serves(rows, how.input.scaling, how.weight.scaling)
    if rows.is_cuda and not (rows.dtype is torch.bfloat16 and is_served):
        raise Left(f"no kernels for {recipe} and {rows.dtype} on this GPU")


def _put(layer: _Layer, emitter: Emitter) -> None:
    graph, count, out = emitter.graph, len(emitter.made), layer.out
    with graph.inserting_before(out):
        arguments = (layer.x, layer.weight, layer.bias)
        try:
            new = emitter.emit(layer.node, scaled_linear, *arguments, recipe=layer.recipe)
        except Exception as error:
            # On fake tensors, an op may raise any error.
            emitter.forget(count)
            raise Left(f"{type(error).__name__}: {error}") from error
    if not are_laid_out_alike(new, out):
        emitter.forget(count)
        raise Left("a result with another memory layout")
    # The traced tensors tell whether a gradient flows.
    key = "val" if "val" in out.meta else "example_value"
    new.meta[key] = value(out)
    out.replace_all_uses_with(new)
    if out is not layer.node:
        graph.erase_node(out)
    _erase(layer.node, graph, layer.inner)


def _erase(node: Node, graph: Graph, inner: Collection[Node]) -> None:
    """Remove a node, and its configuration or whatever else of the layer is not read any more."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        is_of_layer = each in inner or quantized.is_configuration(each.target)
        if is_of_layer and not each.users and not each._erased:
            _erase(each, graph, inner)


def _constant(argument: Any) -> Any:
    """Return the value of an argument of torchao's, whose configuration is written out as nodes.

    Raises:
        Left: If it is computed in another way.
    """
    if not isinstance(argument, Node):
        return argument
    made: Any = argument.target
    if not quantized.is_configuration(made):
        raise Left("a configuration that is no constant")
    args, kwargs = map_arg((argument.args, argument.kwargs), _constant)
    return made(*args, **kwargs)


def _recipe(config: Any) -> Recipe:
    """Return the recipe that corresponds to a `Float8LinearConfig`.

    Raises:
        Left: If there is none.
    """
    x, grad = _cast(config.cast_config_input), _cast(config.cast_config_grad_output)
    of_wgrad = (
        _cast(config.cast_config_input_for_grad_weight),
        _cast(config.cast_config_grad_output_for_grad_weight),
    )
    has_fp8_wgrad = of_wgrad == (x, grad)
    if has_fp8_wgrad or of_wgrad == (None, None):
        fields: Sequence[Any] = (
            *(x, _cast(config.cast_config_weight)),
            *(_cast(config.cast_config_weight_for_grad_input), grad),
            *(has_fp8_wgrad, config.round_scales_to_power_of_2),
        )
        for recipe in recipes.RECIPES.values():
            if recipe[1:] == tuple(fields):
                return recipe
    raise Left(f"no recipe is {config}")


def _cast(config: Any) -> Cast | None:
    """Return how an operand is cast, None if it is not."""
    if config.scaling_type.value == "disabled":
        return None
    return Cast(config.target_dtype, _SCALINGS[config.scaling_granularity.value])
