"""What tests of the autograd node share: calls with it and by Python alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accuracy import NAMES, as_copies, make_inputs
from torch import Tensor

import fused_norm as fn
from fused_norm.ops import node

LAYOUTS = {
    "expanded": lambda dy: dy[:1].expand_as(dy),
    "transposed": lambda dy: dy.t().contiguous().t(),
    "sliced": lambda dy: torch.cat([dy, dy], 1)[:, :16],
    "negated": lambda dy: torch._neg_view(dy),
    "zeros": lambda dy: torch._efficientzerotensor(dy.shape, dtype=dy.dtype, device=dy.device),
}


def inputs_for(device: str, rows: int = 16) -> list[Tensor]:
    """Return inputs that the fused kernels of a device take."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return make_inputs(rows, 8, 16, dtype=dtype, device=device, requires_grad=True)


def from_python(run: Callable[[], object]) -> object:
    """Return what a function does without the node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "module", lambda: None)
        return run()


def gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor
) -> list[Tensor]:
    copies = as_copies(inputs)
    function(*copies).backward(grad_output)
    return [t.grad for t in copies if t is not None]


def assert_as_python(
    inputs: list[Tensor], grad_output: Tensor, run: Callable[..., Tensor] | None = None
) -> None:
    """Assert the bits that Python's backward gives."""
    mine = gradients(run or fn.fused_layernorm_linear, inputs, grad_output)
    other = from_python(lambda: gradients(fn.fused_layernorm_linear, inputs, grad_output))
    for name, a, b in zip(NAMES, mine, other, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name
