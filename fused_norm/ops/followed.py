"""Gradients of the ops that exported programs hold: those of PyTorch's ops that compute the same.

Elsewhere an autograd function ties an op to its backward, and autograd does not see the op itself.
A program holds the op alone, and may be trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fused_norm.ops.registration import register_followed


class _Call(NamedTuple):
    """A call of an op without its tensors.

    Attributes:
        op: Computes it where autograd does not look.
        formula: Computes the same with PyTorch's ops, or returns NotImplemented.
        structure: How its arguments are nested.
        leaves: Its arguments, None for tensors.
        places: Where the tensors are among them.
    """

    op: Callable[..., Any]
    formula: Callable[..., Any]
    structure: TreeSpec
    leaves: list[Any]
    places: list[int]

    def arguments(self, tensors: Any) -> Any:
        """Return the arguments with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.structure)


class _Followed(torch.autograd.Function):
    """Runs an op, and differentiates the formula."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        """Return the op's result, several in a tuple."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.call = call
        results = call.op(*call.arguments(tensors))
        return results if isinstance(results, Tensor) else tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the tensors, differentiable themselves."""
        call, tensors = ctx.call, ctx.saved_tensors
        needed = [i for i, n in enumerate(ctx.needs_input_grad[1:]) if n]
        given = [g for g in grad_outputs if g is not None]

        def compute(*values: Tensor) -> tuple[Tensor, ...]:
            changed = list(tensors)
            for place, value in zip(needed, values, strict=True):
                changed[place] = value
            results = call.formula(*call.arguments(changed))
            if results is NotImplemented:
                raise RuntimeError("fused_norm: an op that keeps tensors has no gradients itself")
            results = (results,) if isinstance(results, Tensor) else results
            pairs = zip(results, grad_outputs, strict=True)
            return tuple(result for result, gradient in pairs if gradient is not None)

        found: list[Tensor | None] = [None] * len(tensors)
        if given:
            # Not unpacked: PyTorch's annotations have a third result, which is optional.
            pull = torch.func.vjp(compute, *(tensors[i] for i in needed))[1]
            for place, gradient in zip(needed, pull(tuple(given)), strict=True):
                found[place] = gradient
        return (None, *found)


def follow(name: str, formula: Callable[..., Any]) -> None:
    """Give an op gradients where autograd sees it; it still runs as it is.

    Args:
        name: The op's name.
        formula: Computes the same with PyTorch's ops, or returns NotImplemented.
    """

    def run(op: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if torch._C._are_functorch_transforms_active():
            return formula(*arguments)
        return _run(op, formula, arguments)

    register_followed(name, run)


def refuse(name: str) -> None:
    """Have an op without such a formula raise an error where a gradient reaches it.

    Args:
        name: The op's name.
    """

    def formula(*_: Any) -> Any:
        raise RuntimeError(
            f"fused_norm::{name} has no gradients in an exported program: train the model itself"
        )

    def run(op: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if torch._C._are_functorch_transforms_active():
            return op(*arguments)
        return _run(op, formula, arguments)

    register_followed(name, run)


def _run(op: Callable[..., Any], formula: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    leaves, structure = tree_flatten(arguments)
    places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor)]
    others = [None if isinstance(v, Tensor) else v for v in leaves]
    call = _Call(op, formula, structure, others, places)
    return _Followed.apply(call, *(leaves[i] for i in places))
