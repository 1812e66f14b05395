"""The traced values of a graph's nodes: tensors, their shapes and dtypes, numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg


def value(node: Any) -> Any:
    """Return the value of a node while the graph was traced; tensors are fake ones."""
    if not isinstance(node, Node):
        return None
    return node.meta.get("example_value", node.meta.get("val"))


def computed(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Return what a call of a function or of a method computes.

    Args:
        node: The call.
        value_of: Returns the value of each node among its arguments.
    """
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    target: Any = node.target
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor, or None, is not a subclass with its own ops."""
    return type(tensor).__name__ in ("FakeTensor", "Tensor", "Parameter", "NoneType")


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return type(tensor).__name__ == "DTensor"


def is_tensor(node: Any) -> bool:
    """Return whether a node's value is a tensor."""
    return isinstance(value(node), Tensor)


def shape(node: Any) -> torch.Size:
    """Return the shape of a node's tensor."""
    found: torch.Size = value(node).shape
    return found


def dtype(node: Any) -> torch.dtype:
    """Return the dtype of a node's tensor."""
    found: torch.dtype = value(node).dtype
    return found


def are_same(a: Any, b: Any) -> bool:
    """Return whether two sizes, or tuples of them, are surely equal: no guard is added."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(are_same, a, b))
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def are_laid_out_alike(a: Any, b: Any) -> bool:
    """Return whether two nodes surely are tensors of one shape, dtype, device and memory layout."""
    one, two = value(a), value(b)
    return (
        (one.dtype, one.device) == (two.dtype, two.device)
        and getattr(one, "placements", None) == getattr(two, "placements", None)
        and are_same(tuple(one.shape), tuple(two.shape))
        and have_same_strides(one, two)
    )


def have_same_strides(a: Any, b: Any) -> bool:
    """Return whether tensors of one shape surely have the same layout; that of one row is any."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(are_same(size, 1) or are_same(one, two) for size, one, two in strides)


def number(argument: Any) -> float | None:
    """Return the number that an argument is, or that an input has, then with a guard.

    With dynamic shapes, Dynamo turns a module's numbers, such as its eps, into inputs.

    Args:
        argument: Of a node.
    """
    if isinstance(argument, Node):
        argument = value(argument)
        if isinstance(argument, torch.SymFloat):
            return float(argument)
    if isinstance(argument, (float, int)) and not isinstance(argument, bool):
        return float(argument)
    return None


def is_number(argument: Any, wanted: float) -> bool:
    """Return whether an argument is a given number, to six digits."""
    found = number(argument)
    return found is not None and abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))


def is_single(node: Any) -> bool:
    """Return whether a node is a tensor of one element, of shape `[]` or `[1]`."""
    return is_tensor(node) and value(node).dim() < 2 and are_same(value(node).numel(), 1)


def is_vector(node: Any, features: Any) -> bool:
    """Return whether a node is a tensor of shape `[features]`."""
    return is_tensor(node) and value(node).dim() == 1 and are_same(shape(node)[0], features)
