"""Hopper: a Linear layer by itself, on rows that a pass has normalized, or on any.

    y  = act(x W^T + b)        h, what is activated, beside it where it is kept
    y  = x W^T + b + residual
    dx = dy W
    dW = dy^T z, and db        two launches at most: their sums are long

Where the plans of op/norm_linear/sm90/linear.mojo and linear_backward.mojo decline, these return
None, and PyTorch's product is faster.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

import torch
from torch import Tensor

from fused_norm.backends.sm90_kernels import extension, is_alone, is_hopper, launcher
from fused_norm.call.memory import LOW_PRECISION, address, workspace
from fused_norm.call.record import DECLINED, WANTED, Call
from fused_norm.composition import GATED, Added

# A box of TMA starts at a multiple of 16 bytes, and so does every row.
ALIGNMENT = 16


def linear(
    t: Added, norm: int = 0, *, is_passed: bool = False, invariant: bool = False
) -> Tensor | None:
    """Return x weight^T + bias + residual by one product; None where PyTorch's ops are to do it.

    Args:
        t: The tensors, dense, that `may_add` takes.
        norm: The number of the norm whose extension is at hand.
        is_passed: Whether a pass of ours has just been queued that writes x, and no parameter.
        invariant: Whether a row's bits may not depend on the other rows.
    """
    call = _call(t, is_passed)
    call.residual, call.invariant = address(t.residual), invariant
    kernels = _planned(call, t.x, norm)
    if call.way == DECLINED:
        return None
    y = t.x.new_empty(*t.x.shape[:-1], call.N)
    call.y = y.data_ptr()
    kernels.linear(ctypes.addressof(call))
    return y


def activated(
    t: Added, up: Added | None, norm: int, activation: int, keeps_h: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return act(x weight^T + bias), and what is activated; None where a pass is to follow.

    Args:
        t: The tensors, dense and on a GPU, without a residual; a pass has just written x.
        up: The same of what is gated; None without a gate, or if the weight's second half is that.
        norm: The number of the norm whose extension is at hand.
        activation: Its number.
        keeps_h: Whether to return what is activated, what is gated beside the gates.
    """
    if not may_add(t.x, *t.weight.shape):
        return None
    call = _call(t, True)
    if activation >= GATED and up is None:
        call.N //= 2
        up = Added(t.x, t.weight[call.N :], None if t.bias is None else t.bias[call.N :])
    call.activation, call.h = activation, WANTED if keeps_h else 0
    if up is not None:
        call.up, call.up_bias = up.weight.data_ptr(), address(up.bias)
    kernels = _planned(call, t.x, norm)
    if call.way == DECLINED:
        return None
    width: int = call.N if up is None else 2 * call.N
    h = t.x.new_empty(*t.x.shape[:-1], width) if keeps_h else None
    y = t.x.new_empty(*t.x.shape[:-1], call.N)
    call.h, call.y = address(h), y.data_ptr()
    kernels.linear(ctypes.addressof(call))
    return y, h


def input_gradient(
    dy: Tensor, weight: Tensor, norm: int = 0, invariant: bool = False
) -> Tensor | None:
    """Return dy weight `[M, K]`, or None.

    Args:
        dy: Dense `[M, N]` on a GPU.
        weight: Of shape `[N, K]`.
        norm: The number of the norm whose extension is at hand.
        invariant: Whether a row's bits may not depend on the other rows; both
            are dense and aligned then.
    """
    N, K = weight.shape
    if not may_add(dy, N, K) or dy.dtype is not weight.dtype or not weight.is_contiguous():
        return None
    call = Call(M=dy.shape[0], N=N, K=K, weight=weight.data_ptr(), invariant=invariant)
    call.dy = dy.data_ptr()
    kernels = _kernels(call, dy, norm)
    kernels.plan_input_gradient(ctypes.addressof(call))
    if call.way == DECLINED:
        return None
    dx = dy.new_empty(dy.shape[0], K)
    call.dx = dx.data_ptr()
    kernels.input_gradient(ctypes.addressof(call))
    return dx


class WeightGradient:
    """The product dW = dy^T z, which brings db along, where its plan does not decline."""

    def __init__(self, kernels: ModuleType, call: Call) -> None:
        self._kernels, self._call = kernels, call

    @staticmethod
    def planned(dy: Tensor, z: Tensor, norm: int) -> WeightGradient | None:
        """Return the product of a dense dy `[M, N]` and z `[M, K]`, to be written by then, or None.

        Args:
            dy: Gradient of the Linear layer's output.
            z: Memory for what that multiplied.
            norm: The number of the norm whose extension is at hand.
        """
        (M, K), N = z.shape, dy.shape[1]
        if not may_add(dy, N, K) or z.dtype is not dy.dtype or not dy.is_contiguous():
            return None
        call = Call(M=M, N=N, K=K, dy=dy.data_ptr(), z=z.data_ptr())
        kernels = _kernels(call, dy, norm)
        kernels.plan_weight_gradient(ctypes.addressof(call))
        return None if call.way == DECLINED else WeightGradient(kernels, call)

    def run(self, weight: Tensor, dbias: Tensor | None) -> Tensor:
        """Return dW, and write db.

        Args:
            weight: Whose gradient it is.
            dbias: Receives the sums of the rows of dy, None if they are not wanted.
        """
        call, dweight = self._call, torch.empty_like(weight)
        call.dweight, call.dbias = dweight.data_ptr(), address(dbias)
        scratch = workspace(call.workspace_bytes, weight.device) if call.workspace_bytes else None
        call.workspace = address(scratch)
        self._kernels.weight_gradient(ctypes.addressof(call))
        return dweight


def may_add(x: Tensor, N: int, K: int) -> bool:
    """Return whether a product of x may be ours, and add a residual, as far as its plan agrees.

    Args:
        x: Of shape `[..., K]`.
        N: Outputs of the product.
        K: Length of its sums.
    """
    if not x.is_cuda or x.dtype not in LOW_PRECISION or not is_hopper(x.device.index or 0):
        return False
    elements = ALIGNMENT // x.dtype.itemsize
    return not (N % elements or K % elements)


def adds(x: Tensor, M: int, N: int, K: int) -> bool:
    """Return whether a product of tensors that lie as they should adds a residual on its way.

    Args:
        x: Of the dtype and on the device, of whatever shape.
        M: Rows of the product.
        N: Outputs of the product.
        K: Length of its sums.
    """
    if not may_add(x, N, K):
        return False
    places = dict.fromkeys(("x", "weight", "bias", "residual", "y"), ALIGNMENT)
    call = Call(M=M, N=N, K=K, **places)
    _planned(call, x)
    return bool(call.way != DECLINED)


def _call(t: Added, is_passed: bool) -> Call:
    """Return a record of a product."""
    N, K = t.weight.shape
    call = Call(M=t.x.numel() // K, N=N, K=K, weight=t.weight.data_ptr(), bias=address(t.bias))
    if is_passed:
        call.z = t.x.data_ptr()
    else:
        call.x = t.x.data_ptr()
    return call


def _planned(call: Call, x: Tensor, norm: int = 0) -> ModuleType:
    """Have the way of a product planned; return the kernels."""
    kernels = _kernels(call, x, norm)
    kernels.plan_linear(ctypes.addressof(call))
    return kernels


def _kernels(call: Call, x: Tensor, norm: int) -> ModuleType:
    """Return the kernels beside a norm's, and have the call queued on x's stream."""
    device = x.device.index or 0
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernels, call.context = launcher(extension(x.dtype, norm), device, stream, is_alone())
    return kernels
