"""Decides whether the kernels serve a call of the op family, and prepares its tensors for them.

What they do not serve, including invalid calls, is left to PyTorch's own ops, as in
`ops/validation.py`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fused_norm.activations import is_gate
from fused_norm.call.memory import LOW_PRECISION, statistics_dtype
from fused_norm.call.record import LONGEST_ROW, MOST_GROUPS
from fused_norm.chain import library
from fused_norm.chain.kernels import NUMBERS, may_multiply
from fused_norm.composition import NAMES, Operands, Spec, first
from fused_norm.ops.autocast import cast_call, dtype_of_products
from fused_norm.ops.validation import Wanted, agree, are_strided, serves_now

# Products (M K N) from which a call pays, in inference and in training: half a millisecond on an
# H200 in bfloat16, and a quarter of one on a Xeon thread in float32 (bench, "launch", "wall").
_GPU_PRODUCTS = (2 * 10**10, 6 * 10**10)
_CPU_PRODUCTS = (5 * 10**6, 10**7)
_ORDINARY = (Tensor, torch.nn.Parameter)
_every_size = ContextVar("fused_norm.every_size", default=False)


def as_kernels_need(spec: Spec, t: Operands) -> Operands | None:
    """Return the tensors of a call that the kernels serve, in their format; None for other calls.

    Under autocast, Linear parameters are cast to its dtype, and x and its summands to one dtype.
    A modulation gets one shape: the leading sizes of x, then ones, then all K features.

    Args:
        spec: What to compute.
        t: The tensors, unchecked.
    """
    if torch._C._are_functorch_transforms_active() or not _are_tensors(t):
        return None
    x, weights = t.x, t.weights
    cast = dtype_of_products(x)
    if cast is not None:
        t = cast_call(t, cast)
        x, weights = t.x, t.weights
        if spec.returns_norm and x.dtype is not weights[0].dtype:
            # Under autocast a norm's own result is wider than the product's input.
            return None
    dtype = weights[0].dtype
    if not x.dim() or not (x.dtype is dtype or (cast is dtype and x.dtype is torch.float32)):
        return None
    K = x.shape[-1]
    if K > LONGEST_ROW or not serves_now(x, dtype):
        return None
    if not fits(spec, t):
        return None
    return t if first(t, "groups") is None else _with_groups(t)


def is_host_bound(t: Operands) -> bool:
    """Return whether PyTorch's ops are faster for a call: one that is limited by the host.

    A call of ours spends more time in Python than PyTorch's ops, which are called from C++. Longer
    kernels hide that, and so do CUDA graphs, which cost the host nothing.

    Args:
        t: The tensors, unchecked.
    """
    x, last = t.x, t.out_weight
    products = 0
    for weight in t.weights if last is None else (*t.weights, last):
        if type(weight) not in _ORDINARY:
            return False
        products += weight.numel()
    if type(x) not in _ORDINARY or x.is_meta or not products:
        return False
    features = x.shape[-1:].numel()
    products *= x.numel() // max(features, 1)
    follows = torch.is_grad_enabled() and (x.requires_grad or t.weights[0].requires_grad)
    return is_small(products, x.device, follows)


@contextmanager
def at_every_size() -> Iterator[None]:
    """Also run kernels for small calls, for which PyTorch's ops are faster."""
    before = _every_size.set(True)
    try:
        yield
    finally:
        _every_size.reset(before)


def is_small(products: int, device: torch.device, follows: bool) -> bool:
    """Return whether a device finishes products before Python can start them.

    Args:
        products: M K N, summed over all layers.
        device: The device.
        follows: Whether a backward follows.
    """
    if _every_size.get():
        return False
    if device.type == "cuda":
        return products < _GPU_PRODUCTS[follows] and not torch.cuda.is_current_stream_capturing()
    return products < _CPU_PRODUCTS[follows] * torch.get_num_threads()


def adds_in_product(x: Tensor, weight: Tensor, groups: int = 0) -> bool:
    """Return whether a Linear layer's product should add a residual, rather than the op after it.

    On Hopper it does so at no cost. Elsewhere, PyTorch's products add it in a separate pass, and a
    norm that follows reads both summands in less time.

    Args:
        x: Of shape `[..., K]`, on its device; for a fake tensor, the traced sizes count.
        weight: Of shape `[N, K]`.
        groups: If it is to multiply by a gate before that, how many groups of rows have their own.
    """
    if not x.is_cuda or not weight.is_contiguous():
        return False
    N, K = map(hint, weight.shape)
    rows = math.prod(map(hint, x.shape[:-1]))
    if not (rows and N and K and may_multiply(x, N, K)):
        return False
    chain = library.load()
    place = (NUMBERS[x.dtype], x.device.index or 0)
    return chain is not None and _adds(chain, *place, rows, N, K, hint(groups))


def _adds(chain: Any, *arguments: int) -> bool:
    return bool(chain.chain_adds(*arguments))


def adds_up_gradients(x: Tensor, sizes: Sequence[int], passes: bool) -> bool:
    """Return whether one kernel adds up the gradients that several Linear layers give their rows.

    Only on Hopper, where that takes less time than a product for each of them.

    Args:
        x: Of shape `[..., K]`, on its device; for a fake tensor, the traced sizes count.
        sizes: The outputs of each layer, whose weight is dense.
        passes: Whether the kernel may also differentiate the norm of these rows: one without a
            modulation.
    """
    *rows, K = map(hint, x.shape)
    M = math.prod(rows)
    if not (M and K and all(may_multiply(x, size, K) for size in sizes)):
        return False
    chain = library.load()
    given = (ctypes.c_int64 * len(sizes))(*sizes)
    place = (NUMBERS[x.dtype], x.device.index or 0, M, K)
    return chain is not None and bool(chain.chain_adds_up(*place, given, len(sizes), passes))


# For PyTorch's compiler, which cannot trace a call of C.
_adds.__dict__["_dynamo_marked_constant"] = True


def hint(size: Any) -> int:
    """Return a size; for a dynamic one, the traced size."""
    if isinstance(size, int):
        return size
    found = getattr(size.node, "hint", None)
    return 1 if found is None else int(found)


def _are_tensors(t: Operands) -> bool:
    given = [v for v in (*t[1:-2], *t.biases) if v is not None]
    return len(t.weights) > 0 and are_strided((t.x, *t.weights, *given), t.x)


def fits(spec: Spec, t: Operands) -> bool:
    """Return whether shapes and dtypes agree, except those that broadcast against groups of rows.

    They may have changed since the forward, through an assignment to a tensor's `data`.

    Args:
        spec: What to compute.
        t: The tensors.
    """
    x, dtype = t.x, t.weights[0].dtype
    K = x.shape[-1]
    affine = first(t, "features")
    norm = x.dtype if affine is None else affine.dtype
    if norm is not x.dtype and not (norm is torch.float32 and x.dtype in LOW_PRECISION):
        return False
    forms: dict[str, tuple[Any, torch.dtype]] = {
        "rows": (x.shape, x.dtype),
        "features": ((K,), norm),
        "statistics": (x.shape[:-1], statistics_dtype(x.dtype)),
    }
    wanted: list[Wanted] = [
        (getattr(t, name), *form) for key, form in forms.items() for name in NAMES[key]
    ]
    N = 0
    for weight, bias in zip(t.weights, t.biases, strict=True):
        if weight.dim() != 2:
            return False
        N = weight.shape[0]
        wanted += [(weight, (N, K), dtype), (bias, (N,), dtype)]
    if spec.is_joined:
        N = sum(weight.shape[0] for weight in t.weights)
    if is_gate(spec.activation):
        if N % 2:
            return False
        N //= 2
    if t.out_weight is not None:
        if t.out_weight.dim() != 2:
            return False
        last = t.out_weight.shape[0]
        wanted += [
            (t.out_weight, (last, N), dtype),
            (t.out_bias, (last,), dtype),
            (t.out_residual, (*x.shape[:-1], last), dtype),
        ]
    return agree(wanted)


def _with_groups(t: Operands) -> Operands | None:
    """Return the call with one modulation per group of consecutive rows, None if there is none."""
    x = t.x
    K = x.shape[-1]
    modulation = {name: getattr(t, name) for name in NAMES["groups"]}
    given = [v for v in modulation.values() if v is not None]
    if any(v.dtype is not x.dtype or v.dim() > x.dim() for v in given):
        return None
    shape = torch.broadcast_shapes(*(v.shape for v in given))
    shape = (1,) * (x.dim() - len(shape)) + tuple(shape)
    if any(size not in (1, whole) for size, whole in zip(shape, x.shape, strict=True)):
        return None
    # Rows of a group share a vector; if they are not consecutive, each row gets its own.
    prefix = x.dim() - 1
    while prefix and shape[prefix - 1] == 1:
        prefix -= 1
    if shape[:prefix] != tuple(x.shape[:prefix]):
        prefix = x.dim() - 1
    if math.prod(x.shape[:prefix]) > MOST_GROUPS:
        return None
    whole = (*x.shape[:prefix], *(1,) * (x.dim() - 1 - prefix), K)
    alike: dict[str, Any] = {n: v if v is None else v.expand(whole) for n, v in modulation.items()}
    return t._replace(**alike)
