"""Decides whether the kernels serve a call.

What they do not serve, including invalid calls, is left to PyTorch's own ops: so errors have
PyTorch's types and messages, and whatever PyTorch accepts works.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fused_norm import reference
from fused_norm.call.memory import LOW_PRECISION
from fused_norm.call.record import LONGEST_ROW
from fused_norm.chain import library
from fused_norm.native import build, compiler
from fused_norm.ops.registration import is_compiling, is_exporting, is_forward_mode

# The tensors of PyTorch's compiler, and those that a collective has yet to write.
_TRACERS = ("torch._subclasses.", "torch.distributed._functional_collectives")
# Tensor's own `__torch_function__`, and the one of a class that disables it.
_TORCH_FUNCTIONS = (getattr(Tensor.__torch_function__, "__func__", None), None)

# A tensor or None, the shape that it should have, and the dtype.
Wanted = tuple[Tensor | None, Sequence[int], torch.dtype | None]
GPU_DTYPES = LOW_PRECISION | {torch.float32}
CPU_DTYPES = GPU_DTYPES | {torch.float64}


def serves(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for a dtype on the device of `x`."""
    if dtype not in (GPU_DTYPES if x.is_cuda else CPU_DTYPES):
        return False
    if x.is_meta:
        return True
    is_known = x.is_cuda or x.is_cpu
    return is_known and build.is_at_hand(x.device, dtype) and library.is_at_hand()


def has_row_kernel(*tensors: Any) -> bool:
    """Return whether row programs serve tensors of one shape and dtype.

    Args:
        tensors: Should be of shape `[..., K]` in a dtype that has kernels.
    """
    x = tensors[0]
    if not are_strided(tensors, x):
        return False
    for other in tensors[1:]:
        if other.dtype is not x.dtype or other.shape != x.shape:
            return False
    return x.dim() > 0 and x.shape[-1] <= LONGEST_ROW and serves_now(x, x.dtype)


def has_trainable_eps_kernel(x: Any, o: Any) -> bool:
    """Return whether the kernels serve a call of `trainable_eps_layer_norm`.

    Args:
        x: Should be a tensor of shape `[..., K]` in a dtype that has kernels.
        o: Should be a tensor of one element, in the dtype of `x`, or float32 for a narrower one.
    """
    return (
        are_strided((o,), x)
        and o.numel() == 1
        and (o.dtype is x.dtype or (o.dtype is torch.float32 and x.dtype in LOW_PRECISION))
        and has_row_kernel(x)
    )


def trainable_eps_by_pytorch(x: Any, o: Any) -> Tensor:
    """Return the result of `trainable_eps_layer_norm` with PyTorch's ops, or raise as they do.

    Raises:
        RuntimeError: If `o` does not have exactly one element.
    """
    if isinstance(o, Tensor) and not o.is_nested:
        if o.numel() != 1:
            raise RuntimeError(f"a Tensor with {o.numel()} elements cannot be converted to Scalar")
        o = o.reshape(())
    return by_pytorch_widened(reference.trainable_eps_layer_norm, x, o)


def div_by_pytorch(a: Any, b: Any) -> Tensor:
    """Return PyTorch's result of a call of `composed.div`, or raise as PyTorch does.

    Raises:
        RuntimeError: If the operands have different shapes.
    """
    if (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and not (a.is_nested or b.is_nested)
        and a.shape != b.shape
    ):
        raise RuntimeError(
            "Expected tensor for argument #1 'a' to have same size as tensor for argument #2 'b'; "
            f"but {list(a.shape)} does not equal {list(b.shape)} "
            "(while checking arguments for div)"
        )
    return by_pytorch_widened(reference.div, a, b)


def by_pytorch_widened(formula: Callable[..., Tensor], x: Any, *others: Any) -> Tensor:
    """Return a formula's result, computed in float32 or wider, in the dtype of `x`.

    Args:
        formula: One of `reference`.
        x: The first argument.
        others: The other arguments.
    """
    tensors = [reference.widened(t) if isinstance(t, Tensor) else t for t in (x, *others)]
    y = formula(*tensors)
    if isinstance(x, Tensor) and x.is_floating_point() and y.is_floating_point():
        return y.to(x.dtype)
    return y


def agree(wanted: Iterable[Wanted]) -> bool:
    """Return whether tensors have the expected shapes and dtypes.

    Args:
        wanted: Each tensor with its shape and its dtype, or None for any; None always agrees.
    """
    for v, shape, dtype in wanted:
        if v is not None and (v.shape != shape or dtype not in (None, v.dtype)):
            return False
    return True


def are_strided(tensors: Iterable[Any], like: Any) -> bool:
    """Return whether all are tensors with strides, on the device of another.

    Args:
        tensors: Should be tensors.
        like: Should be the other one.
    """
    # Loops: a generator would take longer than everything else here.
    if not isinstance(like, Tensor):
        return False
    for v in tensors:
        if v is not like and not (isinstance(v, Tensor) and v.device == like.device):
            return False
        if not is_strided(v):
            return False
    return True


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is one piece of memory, with strides."""
    return tensor.layout is torch.strided and not tensor.is_nested and _is_known(type(tensor))


def _is_known(kind: Any) -> bool:
    """Return whether tensors of a type accept any op, judging by their class.

    Quantized and distributed tensors accept only PyTorch's ops, which their classes define.
    """
    if kind is Tensor or kind is Parameter:
        return True
    return bool(
        kind.__module__.startswith(_TRACERS)
        or (
            kind.__torch_dispatch__ is Tensor.__torch_dispatch__
            and getattr(kind.__torch_function__, "__func__", None) in _TORCH_FUNCTIONS
        )
    )


def serves_now(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether kernels serve a call now; say once for which dtypes there are none."""
    if is_forward_mode():
        # PyTorch's ops carry tangents, the kernels would drop them.
        return False
    if is_onnx_export() or _is_traced():
        return False
    if serves(x, dtype):
        return True
    if dtype.is_floating_point:
        _say_no_kernel(x.device, dtype)
    return False


def _is_traced() -> bool:
    """Return whether `torch.jit.trace` is active.

    It runs a call with gradients and without, and expects the same ops: PyTorch's, which also exist
    without this library when a program is loaded, and which have derivatives.
    """
    return not is_compiling() and bool(torch._C._get_tracing_state())


def _say_no_kernel(device: torch.device, dtype: torch.dtype) -> None:
    served = GPU_DTYPES if device.type == "cuda" else CPU_DTYPES
    if dtype not in served:
        return _say_once(device.type, (dtype,), False)
    if not library.is_at_hand():
        every = tuple(d for d in build.DTYPES if d in served)
        return _say_once(device.type, every, False, "a C++ compiler such as g++")
    # All at once: a model that uses them one after another gets one warning.
    missing = [d for d in build.DTYPES if d in served and not build.is_at_hand(device, d)]
    return _say_once(device.type, tuple(missing) or (dtype,), True)


# A compiler cannot trace a warning.
_say_no_kernel.__dict__["_dynamo_marked_constant"] = True


def is_onnx_export() -> bool:
    """Return whether a model is being exported to ONNX, which knows only PyTorch's ops."""
    if not (is_exporting() or torch._C._get_tracing_state()):
        return False
    return torch.onnx.is_in_onnx_export()


@functools.cache
def _say_once(
    device_type: str, dtypes: tuple[torch.dtype, ...], can_be_built: bool, missing: str = ""
) -> None:
    how = f". `{compiler.INSTALL}` installs what builds those" if can_be_built else ""
    how = f": {missing} is missing, which builds what calls them{how}" if missing else how
    warnings.warn(
        f"fused_norm has no kernels for {', '.join(map(str, dtypes))} on {device_type}: "
        f"PyTorch's own ops compute them{how}",
        stacklevel=5,
    )
