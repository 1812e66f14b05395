"""Products of rows and a weight: PyTorch's, or our own where they are faster, or have to be.

Where rows may not depend on each other, they are ours: PyTorch's choose their kernel, and with it
the order of sums, by the number of rows. Ours take the products of a row in one order: on a CPU
always, on Hopper in tiles of any shape, as long as no two blocks share a sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm.backends import cpu, linear
from fused_norm.backends.sm90_kernels import is_hopper
from fused_norm.call.memory import LOW_PRECISION, address, aligned, dense, lies_transposed
from fused_norm.call.record import FUSED, NO_NORM, Call
from fused_norm.composition import Added
from fused_norm.native import build

_WHERE = "batch_invariant() needs a CPU, or a Hopper GPU with bfloat16 or float16"


def require_invariant(x: Tensor, dtype: torch.dtype, weights: Iterable[Tensor | None]) -> None:
    """Raise an error if there are no products whose rows do not depend on each other.

    Args:
        x: Rows, on their device.
        dtype: That of the products.
        weights: All that they multiply, None for none.

    Raises:
        RuntimeError: If there are none on this device, in this dtype or of such sizes.
    """
    if x.is_cpu or x.is_meta:
        return
    if not x.is_cuda or not is_hopper(x.device.index or 0):
        raise RuntimeError(f"{_WHERE}, but got a tensor on {_name(x.device)}")
    if dtype not in LOW_PRECISION:
        raise RuntimeError(f"{_WHERE}, but got {dtype} on {_name(x.device)}")
    elements = linear.ALIGNMENT // dtype.itemsize
    for weight in weights:
        if weight is not None and any(size % elements for size in weight.shape):
            raise RuntimeError(
                f"batch_invariant() needs features and outputs that are multiples of {elements} "
                f"on a GPU, but got a weight of shape {list(weight.shape)}"
            )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


# For PyTorch's compiler, which traces no question to the driver.
_name.__dict__["_dynamo_marked_constant"] = True


def linear_add(
    t: Added, invariant: bool = False, *, norm: int = 0, is_passed: bool = False
) -> Tensor:
    """Return x weight^T + bias + residual: on Hopper by one product where that is faster.

    Args:
        t: The tensors, x not empty.
        invariant: Whether a row's bits may not depend on the other rows.
        norm: The number of the norm whose extension is at hand.
        is_passed: Whether a pass of ours has just been queued that writes x, and no parameter.
    """
    if invariant:
        return _invariant(Added(*aligned(*dense(*t))))
    x, weight, bias, residual = t
    # PyTorch's product alone would not copy a weight, however it lies.
    is_dense = weight.is_contiguous() if residual is None else not lies_transposed(weight)
    if is_dense and linear.may_add(x, *weight.shape):
        y = linear.linear(Added(*dense(*t)), norm, is_passed=is_passed)
        if y is not None:
            return y
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is not None:
        return F.linear(x, weight, bias).add_(residual)
    # Not a view of the product: FSDP2 warns of modules that return one.
    y = residual.new_empty(residual.shape)
    rows = y.view(-1, y.shape[-1])
    torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t(), out=rows)
    return y


def _invariant(t: Added) -> Tensor:
    x, weight, bias, residual = t
    if x.is_cuda:
        added = linear.linear(t, invariant=True)
        assert added is not None
        return added
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    call = _call(x, weight)
    call.x, call.bias, call.y = x.data_ptr(), address(bias), y.data_ptr()
    kernels = cpu.extension("norm_linear_cpu", x.dtype)
    kernels.plan_forward(ctypes.addressof(call))
    _run(kernels.forward, call)
    return y if residual is None else y.add_(residual)


def input_gradient(dy: Tensor, weight: Tensor, invariant: bool, norm: int = 0) -> Tensor:
    """Return dy weight.

    Args:
        dy: Of shape `[M, N]`, not empty.
        weight: Of shape `[N, K]`.
        invariant: Whether a row may depend on no other.
        norm: The number of the norm whose extension is at hand.
    """
    if not invariant:
        ours = linear.input_gradient(dy, weight, norm) if dy.is_contiguous() else None
        return torch.mm(dy, weight) if ours is None else ours
    dy, weight = aligned(*dense(dy, weight))
    if dy.is_cuda:
        found = linear.input_gradient(dy, weight, invariant=True)
        assert found is not None
        return found
    dx = dy.new_empty(dy.shape[0], weight.shape[1])
    call = _call(dx, weight)
    # Without a norm nothing comes of x, but it is read.
    call.dy, call.dx, call.x = dy.data_ptr(), dx.data_ptr(), dx.data_ptr()
    kernels = cpu.extension("norm_linear_cpu", dy.dtype)
    kernels.plan_backward(ctypes.addressof(call))
    _run(kernels.backward, call)
    return dx


def gradients(dy: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of x, the weight and the bias of a Linear layer, None if not wanted.

    Args:
        dy: Gradient of what it returns, shape `[..., N]`, not empty.
        x: Of shape `[..., K]`.
        weight: Of shape `[N, K]`.
        wanted: Whether each is.
    """
    shape = x.shape
    dy, x = (v.flatten(0, -2) for v in dense(dy, x))
    dx = input_gradient(dy, weight, False).view(shape) if wanted[0] else None
    dweight = dbias = None
    if wanted[1]:
        is_dense = weight.is_contiguous()
        planned = linear.WeightGradient.planned(dy, x, 0) if is_dense else None
        if planned is None:
            dweight = torch.mm(dy.t(), x)
        else:
            dbias = dy.new_empty(dy.shape[-1]) if wanted[2] else None
            dweight = planned.run(weight, dbias)
    if wanted[2] and dbias is None:
        dbias = dy.sum(0)
    return [dx, dweight, dbias]


def _call(x: Tensor, weight: Tensor) -> Call:
    N, K = weight.shape
    call = Call(M=x.numel() // K, K=K, N=N, weight=weight.data_ptr())
    call.context, call.threads = build.gomp_parallel(), cpu.threads()
    call.normalization, call.invariant = NO_NORM, True
    return call


def _run(run: Callable[[int], int], call: Call) -> None:
    assert call.way == FUSED
    size: int = call.workspace_bytes
    memory = cpu.scratch(size) if size else None
    call.workspace = address(memory)
    run(ctypes.addressof(call))
