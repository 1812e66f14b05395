"""The row ops as PyTorch knows them: schemas, fakes, kernels, autograd.

An entry at the end of this file is an op and its gradient, `..._backward`; their kernels are the
entries of those names in op/rows/op.mojo. Outputs are new, dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_norm import reference
from fused_norm.call.memory import dense
from fused_norm.chain.rows import run
from fused_norm.ops.registration import differentiable, is_forward_mode, register, without_none

Function = Callable[..., Any]


def _row_op(
    name: str,
    inputs: list[str],
    derivative: Function,
    *,
    has_o: bool = False,
    own_gradient: bool = False,
) -> tuple[Callable[..., Tensor], Function, Function, Function]:
    """Register an op, and its gradient if that is another one.

    Args:
        name: Of the op.
        inputs: The names of the tensors that it takes row by row.
        derivative: Returns the gradients from that of the output and the inputs, for second
            derivatives and beside tangents: PyTorch's ops have those, the kernels do not.
        has_o: Whether a scalar follows the inputs.
        own_gradient: Whether the op is its own gradient, and needs no inputs for it.

    Returns:
        The kernel, the op, the op with gradients, and what finds these from that of the output,
        the inputs and which are wanted.
    """
    arguments = [f"Tensor {each}" for each in (*inputs, *("o" * has_o))]
    kernel = _forward_kernel(name, len(inputs))
    op = gradient = register(
        f"{name}({', '.join(arguments)}) -> Tensor", kernel, _fake, rows=len(inputs)
    )
    several = len(arguments) > 1
    if not own_gradient:
        mask, results = (
            (f", bool[{len(arguments)}] mask", "(Tensor, Tensor)") if several else ("", "Tensor")
        )
        gradient = register(
            f"{name}_backward(Tensor grad_output, {', '.join(arguments)}{mask}) -> {results}",
            _backward_kernel(f"{name}_backward", len(inputs), has_o, several),
            _fake_gradients if several else _fake,
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
            return find_gradients(grad_output, *ctx.saved_tensors, mask)

    def find_gradients(*arguments: Any) -> Any:
        *tensors, mask = arguments
        if torch.is_grad_enabled() or is_forward_mode():
            gradients = derivative(*tensors)
        else:
            gradients = gradient(*tensors, mask) if several else gradient(*tensors)
        if not several:
            return gradients
        return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))

    return kernel, op, differentiable(RowFunction), find_gradients


def _forward_kernel(name: str, inputs: int) -> Callable[..., Tensor]:
    def kernel(*tensors: Tensor) -> Tensor:
        rows = dense(*tensors[:inputs])
        y = torch.empty_like(rows[0])
        if y.numel():
            run(name, rows, (y,), *tensors[inputs:])
        return y

    return kernel


def _backward_kernel(name: str, inputs: int, has_o: bool, several: bool) -> Function:
    def kernel(grad_output: Tensor, *arguments: Any) -> Any:
        mask = arguments[-1] if several else (True,)
        rows = dense(grad_output, *arguments[:inputs])
        x = rows[1]
        outputs = [torch.empty_like(x) if wanted else None for wanted in mask[:inputs]]
        scalars: tuple[Tensor | None, ...] = ()
        if has_o:
            o = arguments[inputs]
            # Rows without elements have no share in it.
            make = o.new_empty if x.numel() else o.new_zeros
            scalars = (o, make(o.shape) if mask[inputs] else None)
        if x.numel():
            run(name, rows, outputs, *scalars)
        return without_none([*outputs, *scalars[1:]], x) if several else outputs[0]

    return kernel


def _fake(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gradients(
    grad_output: Tensor, x: Tensor, other: Tensor, mask: list[bool]
) -> list[Tensor]:
    wanted = zip((x, other), mask, strict=True)
    return without_none([t.new_empty(t.shape) if w else None for t, w in wanted], x)


def _mean_backward(grad_output: Tensor) -> Tensor:
    run = reference.mean if is_forward_mode() else mean_with_gradients
    gradient: Tensor = run(grad_output)
    return gradient


(
    trainable_eps_forward,
    trainable_eps,
    trainable_eps_with_gradients,
    trainable_eps_gradients,
) = _row_op(
    "trainable_eps_layer_norm", ["x"], reference.trainable_eps_layer_norm_backward, has_o=True
)
_, mean, mean_with_gradients, _ = _row_op("composed_mean", ["x"], _mean_backward, own_gradient=True)
_, norm, norm_with_gradients, _ = _row_op("composed_norm", ["v"], reference.norm_backward)
_, div, div_with_gradients, _ = _row_op("composed_div", ["a", "b"], reference.div_backward)
