"""The arguments of PyTorch's attention in a graph, `F.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments that attention is given, by their names."""
    return dict(zip(_NAMES, node.args, strict=False)) | node.kwargs


def give(node: Node, name: str, new: Any) -> None:
    """Change an argument of attention, or add it.

    Args:
        node: The call.
        name: The argument's name.
        new: What it becomes.
    """
    if name in _NAMES and _NAMES.index(name) < len(node.args):
        node.update_arg(_NAMES.index(name), new)
    else:
        node.update_kwarg(name, new)
