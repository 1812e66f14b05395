"""Quantization as PyTorch knows it: matrices in 8 bits and their scales, also transposed.

On Hopper kernels quantize bfloat16 with scales for rows, for columns and for a tensor; elsewhere
PyTorch's ops do what `recipes.py` says.
"""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import recipes
from fused_norm.call import frozen
from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.ops.registration import define_in_python
from fused_norm.recipes import E4M3, E5M2, Cast

# Operands of 8 bits start, and each of their rows, at a multiple of 16 bytes.
MULTIPLE = 16
# In the record, as op/rows/types.mojo has them.
TYPES = {E4M3: 4, E5M2: 5}


def serves(x: Tensor, *scalings: str) -> bool:
    """Return whether kernels compute on a tensor with such scales."""
    return (
        x.is_cuda
        and all(scaling in ("row", "tensor") for scaling in scalings)
        and kernels.is_hopper(x.device.index or 0)
    )


@functools.cache
def _launcher(device: int, stream: int) -> tuple[ModuleType, int]:
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    return kernels.launcher(extension, device, stream, True)


def run(name: str, device: torch.device, **fields: Any) -> None:
    """Run a kernel on the current stream.

    Args:
        name: Its entry point.
        device: Where.
        **fields: Those of the record; of tensors the address, 0 for None.
    """
    index = device.index or 0
    module, context = _launcher(index, torch._C._cuda_getCurrentRawStream(index))
    call = Call(context=context)
    for field, value in fields.items():
        if value is not None:
            setattr(call, field, value.data_ptr() if isinstance(value, Tensor) else value)
    getattr(module, name)(ctypes.addressof(call))


def scales_of(shape: Any, scaling: str) -> tuple[Any, Any]:
    """Return the shape of the scales of a matrix.

    Args:
        shape: Its own.
        scaling: What shares one.
    """
    M, K = shape
    blocks = (K + recipes.BLOCK - 1) // recipes.BLOCK
    if scaling == "1x128":
        return M, blocks
    if scaling == "128x128":
        return (M + recipes.BLOCK - 1) // recipes.BLOCK, blocks
    return (M, 1) if scaling == "row" else (1, 1)


def _quantize(
    v: Tensor, is_e5m2: bool, scaling: str, power_of_two: bool, plain: bool, turned: bool
) -> list[Tensor]:
    cast = Cast(E5M2 if is_e5m2 else E4M3, scaling)
    if frozen.has_offloaded():
        frozen.require_values([v])
    if v.dtype is not torch.bfloat16 or not v.numel() or not serves(v, scaling):
        return _by_pytorch(v, cast, power_of_two, plain, turned)
    M, K = v.shape
    if K % 8 and (turned or scaling == "tensor"):
        return _by_pytorch(v, cast, power_of_two, plain, turned)
    (v,) = kernels.in_aligned_memory(v)
    kind = {"eight_bits": TYPES[cast.dtype], "power_of_two": power_of_two}
    results: list[Tensor] = []
    q = torch.empty_like(v, dtype=cast.dtype) if plain else None
    if scaling == "row" and q is not None:
        scale = v.new_empty((M, 1), dtype=torch.float32)
        run("quantize", v.device, M=M, K=K, x=v, z=q, z_scale=scale, **kind)
        results = [q, scale]
    pitch, qt = 0, None
    if turned:
        pitch = M + -M % MULTIPLE
        qt = v.new_empty((K, pitch), dtype=cast.dtype)
    if scaling == "row" and qt is not None:
        scale, maxima = v.new_empty((K, 1), dtype=torch.float32), v.new_zeros(2 * K)
        fields = {"x": v, "zt": qt, "zt_scale": scale, "workspace": maxima, "pitch": pitch}
        run("quantize_by_maxima", v.device, M=M, K=K, **fields, **kind)
        results += [qt, scale]
    if scaling == "tensor":
        scale, maxima = v.new_empty((1, 1), dtype=torch.float32), v.new_zeros(2)
        fields = {"x": v, "z": q, "zt": qt, "z_scale": scale, "workspace": maxima, "pitch": pitch}
        run("quantize_by_maxima", v.device, M=M, K=K, **fields, **kind)
        # No result of an op may be another.
        results = [] if q is None else [q, scale]
        results += [] if qt is None else [qt, scale.clone() if results else scale]
    return results


def _by_pytorch(
    v: Tensor, cast: Cast, power_of_two: bool, plain: bool, turned: bool
) -> list[Tensor]:
    results: list[Tensor] = []
    if plain:
        results += recipes.quantize(v, cast, power_of_two)
    if turned:
        padded = F.pad(v, (0, 0, 0, -v.shape[0] % MULTIPLE))
        results += recipes.quantize(padded.t().contiguous(), cast, power_of_two)
    return results


def _fake_quantize(
    v: Tensor, is_e5m2: bool, scaling: str, power_of_two: bool, plain: bool, turned: bool
) -> list[Tensor]:
    M, K = v.shape
    shapes = [(M, K)] * plain + [(K, (M + MULTIPLE - 1) // MULTIPLE * MULTIPLE)] * turned
    results: list[Tensor] = []
    for shape in shapes:
        results.append(v.new_empty(shape, dtype=E5M2 if is_e5m2 else E4M3))
        results.append(v.new_empty(scales_of(shape, scaling), dtype=torch.float32))
    return results


_op = define_in_python(
    "fp8_quantize(Tensor v, bool is_e5m2, str scaling, bool power_of_two, bool plain, "
    "bool turned) -> Tensor[]",
    _quantize,
    _fake_quantize,
)


def quantize(
    v: Tensor, cast: Cast, power_of_two: bool, *, plain: bool = True, turned: bool = False
) -> list[Tensor]:
    """Return a matrix in 8 bits and its scales, and the same of the matrix transposed.

    Args:
        v: Of shape `[M, K]`.
        cast: How; rows are those of each result.
        power_of_two: Whether scales are rounded up to powers of two.
        plain: Whether the matrix is wanted as it lies.
        turned: Whether it is wanted transposed: its rows are lengthened to a multiple of 16, with
            zeros.

    Returns:
        What is wanted, in this order, each with its scales as `recipes.quantize` returns them.
    """
    is_e5m2 = cast.dtype is E5M2
    found: list[Tensor] = _op(v, is_e5m2, cast.scaling, power_of_two, plain, turned)
    return found
