"""The row ops registered with PyTorch: schemas, fakes, gradients.

Each entry at the end of this file is an op and its gradient, `..._backward`. The chain runs them
(chain/rows.h) with the kernels of those names in op/rows/op.mojo. Outputs are new, dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_norm import reference
from fused_norm.ops.registration import (
    define,
    differentiable,
    is_forward_mode,
    may_follow,
    without_none,
)

Function = Callable[..., Any]


def _row_op(
    name: str,
    inputs: list[str],
    derivative: Function,
    *,
    has_o: bool = False,
    own_gradient: bool = False,
) -> tuple[Callable[..., Tensor], Function]:
    """Register an op, and its gradient unless it is the same op.

    Args:
        name: The op.
        inputs: The names of the tensors that it reads row by row.
        derivative: Returns the gradients from the output's and the inputs, for second derivatives
            and with tangents: PyTorch's ops support these, the kernels do not.
        has_o: Whether a scalar follows the inputs.
        own_gradient: Whether the op is its own gradient, and needs no inputs for it.

    Returns:
        A function that calls the op, with gradients if they may be wanted, and one that computes
            the gradients from the output's, the inputs and which are wanted.
    """
    arguments = [f"Tensor {each}" for each in (*inputs, *("o" * has_o))]
    op = gradient = define(f"{name}({', '.join(arguments)}) -> Tensor", _fake, rows=len(inputs))
    is_masked = len(arguments) > 1
    if not own_gradient:
        mask, results = (
            (f", bool[{len(arguments)}] mask", "(Tensor, Tensor)") if is_masked else ("", "Tensor")
        )
        gradient = define(
            f"{name}_backward(Tensor grad_output, {', '.join(arguments)}{mask}) -> {results}",
            _fake_gradients if is_masked else _fake,
            # A gradient of o is a sum over the rows.
            rows=0 if has_o else 1 + len(inputs),
        )

    class RowFunction(torch.autograd.Function):
        """One output, and the inputs kept for the backward."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*tensors: Tensor) -> tuple[Tensor]:
            """Return the output."""
            return (op(*tensors),)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
            """Keep the inputs."""
            ctx.set_materialize_grads(False)
            if not own_gradient:
                ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor | None) -> Any:
            """Return the gradients that are required."""
            mask = list(ctx.needs_input_grad)
            if grad_output is None:
                return (None,) * len(mask)
            return gradients_of(grad_output, *ctx.saved_tensors, mask)

    def gradients_of(*arguments: Any) -> Any:
        *tensors, mask = arguments
        if torch.is_grad_enabled() or is_forward_mode():
            gradients = derivative(*tensors)
        else:
            gradients = gradient(*tensors, mask) if is_masked else gradient(*tensors)
        if not is_masked:
            return gradients
        return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))

    with_gradients = differentiable(RowFunction)

    def call(*tensors: Tensor) -> Tensor:
        follows = may_follow() and any(t.requires_grad for t in tensors)
        y: Tensor = (with_gradients if follows else op)(*tensors)
        return y

    return call, gradients_of


def _fake(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gradients(
    grad_output: Tensor, x: Tensor, other: Tensor, mask: list[bool]
) -> list[Tensor]:
    wanted = zip((x, other), mask, strict=True)
    return without_none([t.new_empty(t.shape) if w else None for t, w in wanted], x)


def _mean_backward(grad_output: Tensor) -> Tensor:
    return reference.mean(grad_output) if is_forward_mode() else mean(grad_output)


trainable_eps, trainable_eps_gradients = _row_op(
    "trainable_eps_layer_norm", ["x"], reference.trainable_eps_layer_norm_backward, has_o=True
)
mean, _ = _row_op("composed_mean", ["x"], _mean_backward, own_gradient=True)
norm, _ = _row_op("composed_norm", ["v"], reference.norm_backward)
div, _ = _row_op("composed_div", ["a", "b"], reference.div_backward)
