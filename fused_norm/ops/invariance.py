"""The mode in which a row's bits do not depend on other rows: entering it, and asking for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fused_norm.call.memory import LOW_PRECISION
from fused_norm.chain.kernels import ALIGNMENT, is_hopper
from fused_norm.ops.registration import is_compiling

_WHERE = "batch_invariant() needs a CPU, or a Hopper GPU with bfloat16 or float16"
_mode = ContextVar("fused_norm.batch_invariant", default=False)
# Whether the caller is in the mode, if nothing compiles it: faster than `is_batch_invariant`.
is_in_mode = _mode.get
_lock = threading.Lock()
_inside = 0
# Compilers guard on it, as not all support context variables.
_anyone_is_inside = False


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Make the bits of a row independent of the rest of the batch.

        with fn.batch_invariant():
            y = fn.norm_linear(x, weight, bias, norm_weight=gamma, norm_bias=beta)

    Inside, a row has the same bits at any place in a batch of any size: in y, in the sum, in the
    normalized rows, and in the gradients of x and of the residual. The backward may run outside. A
    row's bits do depend on the other sizes, the dtype, the options, which gradients are wanted, and
    the device. Gradients of parameters, scale and shift are sums over rows, and not part of this.

    It holds for `fused_layernorm_linear`, `norm_linear`, `norm_mlp`, `linear_add` and their
    modules: on CPUs in every dtype that has kernels, on Hopper GPUs in bfloat16 and float16 with
    features and outputs that are multiples of 8. PyTorch's products, which choose a kernel by the
    number of rows, compute only the weights' gradients. docs/numerics.md has the cost.

    The mode applies to its own thread or asyncio task. It nests, and works as a decorator. Enter it
    outside of functions that `torch.compile` compiles, which are compiled again for it and are in
    it while any thread is. A program that `torch.export` traces inside stays in the mode.

    Raises:
        RuntimeError: From calls inside that cannot be computed this way: on another GPU, in another
            dtype, under a `torch.func` transform, or on a DTensor; and from the backward if second
            derivatives are asked for.
    """
    _count(1)
    before = _mode.set(True)
    try:
        yield
    finally:
        _mode.reset(before)
        _count(-1)


def is_batch_invariant() -> bool:
    """Return whether the caller is in the mode; in a function being compiled, whether anyone is."""
    return _anyone_is_inside if is_compiling() else _mode.get()


def state() -> tuple[bool, bool]:
    """Return whether the caller is in the mode, and whether anyone is."""
    return _mode.get(), _anyone_is_inside


def _count(change: int) -> None:
    global _inside, _anyone_is_inside
    with _lock:
        _inside += change
        _anyone_is_inside = _inside > 0


def require_invariant(x: Tensor, dtype: torch.dtype, weights: Iterable[Tensor | None]) -> None:
    """Raise an error if there are no products whose rows do not depend on each other.

    Args:
        x: Rows, on their device.
        dtype: The dtype of the products.
        weights: All weights that they multiply, None for an absent one.

    Raises:
        RuntimeError: If there are none on this device, in this dtype or of such sizes.
    """
    if x.is_cpu or x.is_meta:
        return
    if not x.is_cuda or not is_hopper(x.device.index or 0):
        raise RuntimeError(f"{_WHERE}, but got a tensor on {_name(x.device)}")
    if dtype not in LOW_PRECISION:
        raise RuntimeError(f"{_WHERE}, but got {dtype} on {_name(x.device)}")
    elements = ALIGNMENT // dtype.itemsize
    for weight in weights:
        if weight is not None and any(size % elements for size in weight.shape):
            raise RuntimeError(
                f"batch_invariant() needs features and outputs that are multiples of {elements} "
                f"on a GPU, but got a weight of shape {list(weight.shape)}"
            )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


# For PyTorch's compiler, which cannot trace a query of the driver.
_name.__dict__["_dynamo_marked_constant"] = True
