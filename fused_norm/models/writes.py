"""What a node of a graph writes in place, and the memory of its result.

Memory is identified by the storages of the fake tensors in the traced graph. Writes are known from
the schemas of ops and the signatures of PyTorch's functions; any other call is assumed to write all
tensors that it is given.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fused_norm.models.values import value
from fused_norm.ops import quantized

_OPERATORS = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
    *(operator.imatmul, operator.ilshift, operator.irshift, operator.setitem),
}
# End in an underscore because their names would be keywords.
_PURE = {operator.and_, operator.or_, operator.not_, operator.is_}
_METHODS = {"__setitem__", *(f"__{each.__name__}__" for each in _OPERATORS)}
# Training updates these, which schemas do not say.
_RUNNING = ("running_mean", "running_var")
# Ends in an underscore, but writes no values.
_METADATA_ONLY = {"requires_grad_"}
# Modules whose functions write only what their names and signatures say.
_KNOWN = ("torch", "_operator", "math", "fused_norm")


def storages(node: Any) -> frozenset[int]:
    """Return the memory of the tensors that are a node's value; nodes that share any alias."""
    found = set()
    for tensor in tree_leaves(value(node)):
        if isinstance(tensor, Tensor):
            found |= {_storage(plain) for plain in _inner(tensor)}
    return frozenset(found)


def is_given(node: Node) -> bool:
    """Return whether a node is a tensor that a caller of a traced function passes.

    Those that modules own, and exported programs' inputs, share memory as they did in the trace.
    """
    source = getattr(node, "_dynamo_source", None)
    if node.op != "placeholder" or source is None or not isinstance(value(node), Tensor):
        return False
    return not isinstance(value(node), torch.nn.Parameter) and "'_buffers'" not in repr(source)


def _storage(tensor: Tensor) -> int:
    # Sparse tensors have none.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor wraps, or itself if its class wraps none."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        # A batched tensor of vmap, which has no storage of its own.
        yield from _inner(torch._C._functorch.get_unwrapped(tensor))
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        held = getattr(tensor, name)
        # A DTensor also lists its mesh.
        if isinstance(held, Tensor):
            yield from _inner(held)


def written(node: Any) -> list[Node]:
    """Return the nodes among a node's arguments that it writes in place.

    Args:
        node: A node of a graph, or another argument, which writes nothing.
    """
    if not isinstance(node, Node) or node.op in ("placeholder", "get_attr", "output"):
        return []
    target: Any = node.target
    first = node.args[0] if node.args else node.kwargs.get("self", node.kwargs.get("input"))
    if node.op == "call_module":
        return node.all_input_nodes
    if quantized.is_product(target) or quantized.is_configuration(target):
        return []
    if node.op == "call_method":
        name = str(target)
        if not _is_of_torch(getattr(type(value(first)), name, None)):
            return node.all_input_nodes
        return _nodes([first]) if _writes_self(name) or name in _METHODS else []
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _written_by_bodies(node)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _nodes(_by_schema(target, node))
    if target in _OPERATORS:
        return _nodes([first])
    if not _is_of_torch(target):
        return node.all_input_nodes
    found = [node.kwargs.get("out"), *_by_signature(target, node)]
    packet = getattr(torch.ops.aten, getattr(target, "__name__", ""), None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        found += _by_schema(packet, node)
    elif target not in _PURE and _writes_self(getattr(target, "__name__", "")):
        found.append(first)
    return _nodes(found)


def _nodes(arguments: Any) -> list[Node]:
    return [each for each in tree_leaves(arguments) if isinstance(each, Node)]


def _writes_self(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _METADATA_ONLY


def _is_of_torch(function: Any) -> bool:
    """Return whether a function is PyTorch's, Python's or ours, and does not run a user's."""
    module = getattr(function, "__module__", None)
    # Methods of classes in C++ only name the class.
    module = module or getattr(getattr(function, "__objclass__", None), "__module__", None)
    name = getattr(function, "__name__", "")
    is_known = function is getattr or str(module).split(".")[0] in _KNOWN
    return is_known and "trampoline" not in name


@functools.cache
def _schema(target: Any) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return the names of each overload's arguments, and of those that it writes."""
    overloads = [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    return tuple(
        (
            tuple(a.name for a in each._schema.arguments if not a.kwarg_only),
            tuple(
                a.name
                for a in each._schema.arguments
                if (a.alias_info is not None and a.alias_info.is_write) or a.name in _RUNNING
            ),
        )
        for each in overloads
    )


def _by_schema(target: Any, node: Node) -> list[Any]:
    found = []
    for names, writes in _schema(target):
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if "self" in writes and "self" not in given:
            given["self"] = given.get("input")
        found += [given[name] for name in writes if name in given]
    return found


@functools.cache
def _signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        # Functions in C++ have none.
        return None


def _by_signature(target: Any, node: Node) -> list[Any]:
    """Return what one of PyTorch's Python functions writes, including running statistics."""
    signature = _signature(target)
    if signature is None:
        return []
    given = signature.bind(*node.args, **node.kwargs).arguments
    found = [given.get(name) for name in ("out", *_RUNNING)]
    # If nothing is dropped out, nothing is written.
    drops = given.get("training") is not False and given.get("p") != 0.0
    if given.get("inplace") and (drops or "dropout" not in target.__name__):
        found.append(next(iter(given.values())))
    if given.get("max_norm") is not None:
        # An embedding renormalizes the rows that it looks up.
        found.append(given.get("weight"))
    return found


def _written_by_bodies(node: Node) -> list[Node]:
    """Return what an op with graph arguments writes: all tensors unless no graph writes any."""
    root: Any = node.graph.owning_module
    bodies = [
        getattr(root, str(each.target), None)
        for each in node.all_input_nodes
        if each.op == "get_attr" and value(each) is None
    ]
    graphs = [body for body in bodies if isinstance(body, GraphModule)]
    if graphs and not any(map(_writes_its_inputs, graphs)):
        return []
    return [each for each in node.all_input_nodes if storages(each)]


def _writes_its_inputs(body: GraphModule) -> bool:
    inputs = [node for node in body.graph.nodes if node.op in ("placeholder", "get_attr")]
    reach = frozenset[int]().union(*map(storages, inputs))
    if any(value(node) is None for node in inputs if node.op == "placeholder"):
        return any(written(node) for node in body.graph.nodes)
    return any(reach & storages(each) for node in body.graph.nodes for each in written(node))
