"""Quantization ops: matrices in 8 bits and their scales, untransposed and transposed.

On Hopper, the chain (chain/eight_bits.h) quantizes bfloat16 with kernels, with scales for rows,
columns or a tensor; elsewhere PyTorch's ops do what `recipes.py` specifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import recipes
from fused_norm.call import contexts, frozen
from fused_norm.call.prepared import Prepared
from fused_norm.chain import kernels
from fused_norm.ops.registration import define, unseen
from fused_norm.recipes import E4M3, E5M2, Cast

# 8-bit operands, and each of their rows, are aligned to 16 bytes.
MULTIPLE = 16
# What a frozen weight is kept as whose columns have factors (ops/hidden_columns.py).
IN_COLUMNS = "fp8 in columns"


def serves(x: Tensor, *scalings: str) -> bool:
    """Return whether kernels compute on a tensor with such scales."""
    # A kernel has scales of blocks for all of its operands or for none.
    kinds = {scaling in ("1x128", "128x128") for scaling in scalings}
    return x.is_cuda and len(kinds) < 2 and kernels.is_hopper(x.device.index or 0)


def scales_of(shape: Any, scaling: str) -> tuple[Any, Any]:
    """Return the shape of the scales of a matrix.

    Args:
        shape: The matrix's shape.
        scaling: Which elements share a scale.
    """
    M, K = shape
    blocks = (K + recipes.BLOCK - 1) // recipes.BLOCK
    if scaling == "1x128":
        return M, blocks
    if scaling == "128x128":
        return (M + recipes.BLOCK - 1) // recipes.BLOCK, blocks
    return (M, 1) if scaling == "row" else (1, 1)


def _by_pytorch(
    v: Tensor, is_e5m2: bool, scaling: str, power_of_two: bool, plain: bool, transposed: bool
) -> list[Tensor]:
    cast, results = Cast(E5M2 if is_e5m2 else E4M3, scaling), list[Tensor]()
    if plain:
        results += recipes.quantize(v, cast, power_of_two)
    if transposed:
        padded = F.pad(v, (0, 0, 0, -v.shape[0] % MULTIPLE))
        results += recipes.quantize(padded.t().contiguous(), cast, power_of_two)
    return results


def _fake_quantize(
    v: Tensor, is_e5m2: bool, scaling: str, power_of_two: bool, plain: bool, transposed: bool
) -> list[Tensor]:
    M, K = v.shape
    shapes = [(M, K)] * plain + [(K, (M + MULTIPLE - 1) // MULTIPLE * MULTIPLE)] * transposed
    results: list[Tensor] = []
    for shape in shapes:
        results.append(v.new_empty(shape, dtype=E5M2 if is_e5m2 else E4M3))
        results.append(v.new_empty(scales_of(shape, scaling), dtype=torch.float32))
    return results


_op = define(
    "fp8_quantize(Tensor v, bool is_e5m2, str scaling, bool power_of_two, bool plain, "
    "bool transposed) -> Tensor[]",
    _fake_quantize,
    unseen(_by_pytorch),
)


def quantize(
    v: Tensor, cast: Cast, power_of_two: bool, *, plain: bool = True, transposed: bool = False
) -> list[Tensor]:
    """Return a matrix in 8 bits and its scales, and the same for its transpose.

    Args:
        v: Of shape `[M, K]`.
        cast: The target type and scaling, with respect to the rows of each result.
        power_of_two: Whether scales are rounded up to powers of two.
        plain: Whether the untransposed matrix is wanted.
        transposed: Whether its transpose is wanted, with rows zero-padded to a multiple of 16.

    Returns:
        The wanted matrices, in this order, each with its scales as from `recipes.quantize`.
    """
    is_e5m2 = cast.dtype is E5M2
    found: list[Tensor] = _op(v, is_e5m2, cast.scaling, power_of_two, plain, transposed)
    return found


def in_8_bits(
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    scaling: str,
    power_of_two: bool,
    *,
    transposed: bool = False,
) -> tuple[list[Tensor], list[Tensor | None], bool]:
    """Return weights in e4m3, their scales, and whether earlier calls made them, if any are frozen.

    Otherwise they are returned unchanged: the ops that multiply by them quantize them.

    Args:
        weights: Each of shape `[N, K]`.
        scales: The scales of weights that are in 8 bits already, None for others.
        scaling: Which elements share a scale.
        power_of_two: Whether scales are rounded up to powers of two.
        transposed: Whether their transposes are wanted, for gradients.
    """
    if not frozen.is_any():
        return [*weights], [*scales], False
    found = [
        _made(weight, Cast(E4M3, scaling), power_of_two, transposed)
        if scale is None
        else (weight, scale, False)
        for weight, scale in zip(weights, scales, strict=True)
    ]
    return [q for q, *_ in found], [scale for _, scale, _ in found], all(kept for *_, kept in found)


def in_both_layouts(
    weights: Sequence[Tensor], scaling: str, power_of_two: bool
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor], list[Tensor]]:
    """Return weights in e4m3 and their scales, and the same for their transposes; keep nothing.

    Args:
        weights: Each of shape `[N, K]`.
        scaling: Which elements share a scale.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    cast = Cast(E4M3, scaling)
    made = [quantize(weight, cast, power_of_two, transposed=True) for weight in weights]
    scales: list[Tensor | None] = [each[1] for each in made]
    return (
        [each[0] for each in made],
        scales,
        [each[2] for each in made],
        [each[3] for each in made],
    )


def _made(
    weight: Tensor, cast: Cast, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor, bool]:
    kept, is_new = kept_in_8_bits(weight, cast, power_of_two, transposed=transposed)
    q, scale = _quantized(weight, cast, power_of_two, transposed) if kept is None else kept.tensors
    return q, scale, kept is not None and not is_new


def kept_in_8_bits(
    weight: Tensor, cast: Cast, power_of_two: bool, *, transposed: bool = False
) -> tuple[Prepared | None, bool]:
    """Return a frozen weight in 8 bits and its scales, and whether this call made them.

    Args:
        weight: Of shape `[N, K]`.
        cast: The target type and scaling.
        power_of_two: Whether scales are rounded up to powers of two.
        transposed: Whether its transpose is wanted, for gradients.

    Returns:
        None for the first if it is not frozen, or if nothing is kept for it.
    """
    made: list[Tensor] = []

    def make() -> tuple[Tensor, ...]:
        made.extend(_quantized(weight, cast, power_of_two, transposed))
        return tuple(made)

    found = contexts.find([weight], meets=not transposed)
    if found is None:
        return None, False
    record, keys = found
    name = ("fp8", cast.scaling, power_of_two, transposed)
    kept = record.prepared(name, keys, make, weight.device)
    return kept, bool(made)


def _quantized(weight: Tensor, cast: Cast, power_of_two: bool, transposed: bool) -> list[Tensor]:
    # A call that knows of no factors of its columns is rare, and waits for the host.
    away = None if transposed else frozen.left_for(IN_COLUMNS, weight)
    if away is None:
        frozen.require_values([weight])
    else:
        weight = away.to(weight.device)
    return quantize(weight, cast, power_of_two, plain=not transposed, transposed=transposed)
