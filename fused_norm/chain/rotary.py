"""Normalizes and rotates heads with our kernels, if there is one for their layout and sizes."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from fused_norm.call.memory import statistics_dtype
from fused_norm.call.rotary_record import RotaryCall
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.rotation import Caches, Heads, Rotation

# Elements of a head per vector on a CPU; on a GPU, for 16-bit and 32-bit numbers and for float64.
_CPU_WIDTH, _GPU_WIDTHS = 8, (4, 2)
_LANES = 32
# Alignment of rows on a GPU, in bytes.
_ALIGNMENT = 16
# Heads whose gradients of gamma are summed sequentially, and the most partial sums there are; on a
# GPU, partial sums per multiprocessor: the blocks that run on it at once (op/rotary/dense.mojo).
_PART_HEADS, _MOST_PARTS, _MULTIPROCESSOR_PARTS = 32, 512, 3


def serves(t: Heads, rotation: Rotation) -> bool:
    """Return whether a kernel computes a call.

    Args:
        t: The tensors.
        rotation: How heads are rotated.
    """
    x = t.x
    if not x.numel() or any(v is not None and v.dtype not in (x.dtype, torch.float32) for v in t):
        return False
    # The kernels check nothing: PyTorch raises the error if an index is out of bounds.
    if t.gamma is not None and t.gamma.shape != x.shape[-1:]:
        return False
    if t.cos is not None and not _go_with(t.cos, t.sin, x, rotation.size(t)):
        return False
    return has_kernel(x.device, x.dtype, x.shape[-1], rotation.size(t))


def _go_with(cos: Tensor, sin: Tensor | None, x: Tensor, size: int) -> bool:
    """Return whether angles have the shape of the rows of heads."""
    if sin is None or cos.shape != sin.shape or size > x.shape[-1] or not cos.shape[0]:
        return False
    return bool(x.shape[:-2].numel() % cos.shape[0] == 0)


def serves_both(t: Heads, second: Heads, rotation: Rotation) -> bool:
    """Return whether a kernel computes two calls with the same angles at once.

    Args:
        t: The tensors of one.
        second: Those of the other: its cos and sin are not read.
        rotation: How heads of both are rotated.
    """
    x, other, gammas = t.x, second.x, (t.gamma, second.gamma)
    if x.shape[:-2] != other.shape[:-2] or x.shape[-1] != other.shape[-1]:
        return False
    if x.dtype is not other.dtype or len({g.dtype for g in gammas if g is not None}) > 1:
        return False
    return serves(t, rotation) and serves(second._replace(cos=t.cos, sin=t.sin), rotation)


def serves_caches(t: Heads, second: Heads, third: Tensor, into: Caches, rotation: Rotation) -> bool:
    """Return whether a kernel rotates two tensors, and stores the second and a third in caches.

    Args:
        t: The tensors of the first, x of shape `[B, T, H, D]`.
        second: Those of the second, as for `serves_both`.
        third: The third.
        into: The caches.
        rotation: How heads of the first two are rotated.
    """
    other = second.x
    if t.x.dim() != 4 or not serves_both(t, second, rotation) or third.shape != other.shape:
        return False
    if third.dtype is not other.dtype or not _is_index(into.slots, t.x):
        return False
    sizes = torch.Size([other.shape[0], other.shape[2], into.seconds.shape[2], other.shape[3]])
    return all(cache.shape == sizes and _holds(cache, other) for cache in into[:2])


def _is_index(slots: Tensor, x: Tensor) -> bool:
    is_one = slots.dtype is torch.int64 and slots.shape == x.shape[1:2] and slots.stride(0) == 1
    return is_one and slots.device == x.device


def _holds(cache: Tensor, x: Tensor) -> bool:
    """Return whether a kernel can write heads into a cache, each of its own elements once."""
    *strides, of_elements = cache.stride()
    if cache.dtype is not x.dtype or cache.device != x.device or of_elements != 1:
        return False
    if cache.is_neg() or 0 in strides:
        return False
    steps = (*(stride * x.dtype.itemsize for stride in strides), cache.data_ptr())
    return not x.is_cuda or not any(step % _ALIGNMENT for step in steps)


def has_kernel(device: torch.device, dtype: torch.dtype, D: int, R: int) -> bool:
    """Return whether there is a kernel for heads.

    Args:
        device: Their device.
        dtype: Their dtype.
        D: Elements of a head.
        R: How many of these are rotated.
    """
    if dtype not in build.DTYPES:
        return False
    if device.type == "cpu":
        pieces, most = 2 * _CPU_WIDTH, D
    elif device.type == "cuda":
        pieces = 2 * _GPU_WIDTHS[dtype.itemsize > 4]
        most = _LANES * pieces
    else:
        return False
    return not (D % pieces or R % pieces) and most >= D and build.is_at_hand(device, dtype)


def pitch_of(x: Tensor) -> int | None:
    """Return the elements from one row of heads to the next, None if that varies.

    Args:
        x: Heads, shape `[..., H, D]`.
    """
    *rows, heads, D = x.shape
    *strides, of_heads, of_elements = x.stride()
    if of_elements != 1 or (heads > 1 and of_heads != D) or x.is_neg() or x._is_zerotensor():
        return None
    # Dimensions of size 1 may have any stride.
    pairs = [(size, stride) for size, stride in zip(rows, strides, strict=True) if size != 1]
    for (_, outer), (size, inner) in itertools.pairwise(pairs):
        if outer != size * inner:
            return None
    pitch = pairs[-1][1] if pairs else heads * D
    if x.is_cuda and (pitch * x.dtype.itemsize % _ALIGNMENT or x.data_ptr() % _ALIGNMENT):
        return None
    return pitch


def forward(t: Heads, rotation: Rotation) -> Tensor:
    """Return the heads, normalized and rotated.

    Args:
        t: The tensors; on a GPU aligned, x with a pitch, the others dense.
        rotation: How heads are rotated.
    """
    y = t.x.new_empty(t.x.shape)
    _run(t, rotation, y=y)
    return y


def forward_both(t: Heads, second: Heads, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return two tensors of heads, normalized and rotated with the same angles, by one launch.

    Args:
        t: The tensors of the first, as for `forward`.
        second: Those of the second: its cos and sin are not read.
        rotation: How heads of both are rotated.
    """
    y, second_y = (v.new_empty(v.shape) for v in (t.x, second.x))
    _run(t, rotation, y=y, second_y=second_y, **_second(second))
    return y, second_y


def _second(second: Heads) -> dict[str, Any]:
    """Return the fields of the tensor that is rotated second, without its result."""
    return {
        "second_heads": second.x.shape[-2],
        "second_pitch": pitch_of(second.x),
        "second_x": second.x,
        "second_gamma": second.gamma,
    }


def forward_into_caches(
    t: Heads, second: Heads, third: Tensor, into: Caches, rotation: Rotation
) -> Tensor:
    """Return heads, normalized and rotated; store others, and a third tensor as it is, in caches.

    Args:
        t: The tensors of the heads that are returned, as for `forward`; x `[B, T, H, D]`.
        second: Those of the heads that are stored: its cos and sin are not read.
        third: The third tensor, with a pitch.
        into: The caches.
        rotation: How heads of the first two are rotated.
    """
    y = t.x.new_empty(t.x.shape)
    fields: dict[str, Any] = {"third_x": third, "third_pitch": pitch_of(third)}
    for name, cache in (("second", into.seconds), ("third", into.thirds)):
        steps = zip(("sequence", "head", "slot"), cache.stride()[:3], strict=True)
        fields |= {f"{name}_y": cache} | {f"{name}_{step}": size for step, size in steps}
    _run(
        t,
        rotation,
        y=y,
        slots=into.slots,
        slot_count=into.seconds.shape[2],
        tokens=t.x.shape[1],
        **_second(second),
        **fields,
    )
    return y


def backward(
    dy: Tensor, t: Heads, rotation: Rotation, wants_gamma: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x, and of gamma if wanted.

    Args:
        dy: The gradient of the result, dense.
        t: The tensors; on a GPU aligned, x with a pitch, the others dense.
        rotation: How heads are rotated.
        wants_gamma: Whether the gradient of gamma is wanted, if there is gamma.
    """
    x = t.x
    dx, dgamma, total = x.new_empty(x.shape), None, None
    if wants_gamma and t.gamma is not None:
        dgamma = x.new_empty((_parts(x, 0), x.shape[-1]), dtype=statistics_dtype(x.dtype))
        # On a GPU, the kernel's launch adds the parts up: PyTorch's sum takes longer.
        total = t.gamma.new_empty(t.gamma.shape) if x.is_cuda else None
    _run(t, rotation, dy=dy, dx=dx, dgamma=dgamma, gamma_sum=total)
    if dgamma is None or t.gamma is None or total is not None:
        return dx, total
    return dx, dgamma.sum(0).to(t.gamma.dtype)


def _parts(x: Tensor, other_heads: int) -> int:
    heads, most = x.shape[:-2].numel() * (x.shape[-2] + other_heads), _MOST_PARTS
    if x.is_cuda:
        most = _MULTIPROCESSOR_PARTS * _multiprocessors(x.device.index or 0)
    return min(-(-heads // _PART_HEADS), most)


@functools.cache
def _multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _run(t: Heads, rotation: Rotation, **fields: Any) -> None:
    x = t.x
    *_, heads, D = x.shape
    units = x.numel() // D
    others = fields.get("second_heads", 0) * (2 if "third_x" in fields else 1)
    module, context, threads = kernels.passes_for(x)
    record = RotaryCall(
        context=context,
        threads=threads,
        M=units // heads,
        heads=heads,
        D=D,
        pitch=pitch_of(x),
        rotary=rotation.size(t),
        is_interleaved=rotation.is_interleaved,
        is_normalized=rotation.is_normalized,
        eps=rotation.eps,
        weight_offset=rotation.weight_offset,
        parts=_parts(x, others),
    )
    for gamma in (t.gamma, fields.get("second_gamma")):
        if gamma is not None:
            record.gamma_is_float32 = gamma.dtype is torch.float32
    if t.cos is not None:
        record.positions, record.angles = t.cos.shape
        record.angles_are_float32 = t.cos.dtype is torch.float32
    tensors = {**t._asdict(), **fields}
    for name, value in tensors.items():
        if value is not None:
            setattr(record, name, value.data_ptr() if isinstance(value, Tensor) else value)
    module.rotary(ctypes.addressof(record))
