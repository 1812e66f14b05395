"""The ops of a Linear layer and the residual sum after it: one product that adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.call.memory import is_transposed
from fused_norm.chain.kernels import may_multiply
from fused_norm.composition import Added
from fused_norm.ops.autocast import cast, dtype_of_products
from fused_norm.ops.flops import count_flops
from fused_norm.ops.invariance import require_invariant
from fused_norm.ops.operands import adds_in_product as is_added_in_product
from fused_norm.ops.operands import is_small
from fused_norm.ops.registration import define, each_once, is_compiling, is_watched, may_follow
from fused_norm.ops.validation import Wanted, agree, are_strided, serves_now


def _fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linear_add_by_pytorch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, _: bool = False
) -> Tensor:
    """Return residual + x weight^T + bias, with PyTorch's ops."""
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


_op = define(
    "linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
    "bool batch_invariant=False) -> Tensor",
    _fake,
    linear_add_by_pytorch,
)
count_flops("linear_add", lambda x, weight, *_: 2 * x.numel() * weight.shape[0])


def _fake_gradients(_: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[int]) -> list[Tensor]:
    like = (x, weight, weight[:, 0])
    return [
        like[place].new_empty(like[1].t().shape).t()
        if place == 1 and is_transposed(weight)
        else like[place].new_empty(like[place].shape)
        for place in wanted
    ]


_gradients_op = define(
    "linear_add_backward(Tensor grad_output, Tensor x, Tensor weight, int[] wanted) -> Tensor[]",
    _fake_gradients,
)
count_flops(
    "linear_add_backward",
    lambda _, x, weight, wanted: 2 * x.numel() * weight.shape[0] * len({0, 1} & set(wanted)),
)


class LinearAdd(torch.autograd.Function):
    """Gradients of the sum. Saves x and the weight for the backward, like a Linear layer.

    The last argument is whether rows may not depend on each other.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return the sum."""
        ctx.save_for_backward(*arguments[:2])
        ctx.batch_invariant = arguments[-1]
        total: Tensor = _op(*arguments)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the weight, the bias and the residual."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        is_twice = torch.is_grad_enabled() and not is_compiling()
        if not (is_twice or ctx.batch_invariant):
            places = [place for place, w in enumerate(wanted[:3]) if w]
            found = iter(_gradients_op(grad_output, x, weight, places) if places else ())
            gradients = [next(found) if w else None for w in wanted[:3]]
            return (*gradients, grad_output if wanted[3] else None, None)
        rows = grad_output.flatten(0, -2)
        dx = None
        if wanted[0] and ctx.batch_invariant:
            if is_twice:
                raise RuntimeError("batch_invariant() has no derivatives of gradients")
            dx = _op(grad_output, weight.t().contiguous(), None, None, True)
        elif wanted[0]:
            dx = grad_output @ weight
        return (
            dx,
            rows.t() @ x.flatten(0, -2) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
            grad_output if wanted[3] else None,
            None,
        )


_apply = super(torch.autograd.Function, LinearAdd).apply


def linear_add(t: Added, invariant: bool = False) -> Tensor:
    """Return residual + x weight^T + bias, with one product if that is faster.

    Args:
        t: The tensors; the residual may be absent only if `invariant`.
        invariant: Whether rows may not depend on each other.

    Raises:
        RuntimeError: If `invariant`, and there is no product for it.
    """
    x, weight, bias, residual = t
    if invariant and (dtype := dtype_of_products(x)) is not None:
        return _invariant_in(dtype, t)
    if not fits(t):
        y = F.linear(x, weight, bias)
        if invariant and x.numel() and y.numel():
            # PyTorch's ops have raised no error.
            raise RuntimeError("batch_invariant() has no product for tensors that are not plain")
        return y if residual is None else residual + y
    if invariant:
        require_invariant(x, x.dtype, [weight])
    elif residual is not None and not _pays(x, weight):
        return residual + F.linear(x, weight, bias)
    if may_follow() and any(v is not None and v.requires_grad for v in t):
        total: Tensor = (LinearAdd.apply if is_watched() else _apply)(*each_once(t), invariant)
    else:
        total = _op(*t, invariant)
    return total


def adds_in_product(t: Added) -> bool:
    """Return whether one product should add, judging by sizes and layouts.

    Args:
        t: The tensors, including a residual.
    """
    x, weight, _, residual = t
    if not isinstance(x, Tensor) or not x.is_cuda or residual is None:
        return False
    return fits(t) and _pays(x, weight) and is_added_in_product(x, weight)


def _invariant_in(dtype: torch.dtype, t: Added) -> Tensor:
    """Return the product in autocast's dtype, and then the sum."""
    with torch.autocast(t.x.device.type, enabled=False):
        y = linear_add(Added(*cast(dtype, *t[:3])), True)
    return y if t.residual is None else t.residual + y


def fits(t: Added) -> bool:
    """Return whether kernels may take a call; PyTorch's ops raise the errors of others.

    Args:
        t: The tensors, unchecked.
    """
    x, weight, bias, residual = t
    if torch._C._are_functorch_transforms_active():
        return False
    if not are_strided([v for v in t if v is not None], x) or x.dim() < 2 or weight.dim() != 2:
        return False
    outputs = weight.shape[0]
    if not x.numel() or not outputs:
        return False
    wanted: list[Wanted] = [
        (weight, (outputs, x.shape[-1]), x.dtype),
        (bias, (outputs,), x.dtype),
        (residual, (*x.shape[:-1], outputs), x.dtype),
    ]
    return agree(wanted) and serves_now(x, x.dtype)


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Return whether one product should add."""
    if not may_multiply(x, *weight.shape):
        return False
    follows = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return is_watched() or not is_small(x.numel() * weight.shape[0], x.device, follows)
