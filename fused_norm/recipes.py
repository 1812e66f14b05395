"""FP8 recipes: which operands of a Linear layer's products have 8 bits, and how they are scaled.

    q = round(v / scale),  scale = max(max |v|, 1e-12) / largest number of the type

Elements that share a scale are a row of an operand, a tensor, 128 elements of a row or a block of
128 by 128. Names and numerics are torchao's: `torchao.float8.Float8LinearRecipeName`, and for
blocks DeepSeek's, as in transformers' FineGrainedFP8 and TransformerEngine's Float8BlockScaling.
Everything here uses PyTorch's ops, on any device: the reference for the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# If all magnitudes are smaller than this, the scale is computed from this, as in torchao.
LEAST = 1e-12
# Elements along each side of a block.
BLOCK = 128


class Cast(NamedTuple):
    """How an operand of a product becomes FP8.

    Attributes:
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        scaling: Which elements share a scale: `"row"`, `"tensor"`, `"1x128"` or `"128x128"`.
    """

    dtype: torch.dtype
    scaling: str


class Recipe(NamedTuple):
    """Which operands of the three products have 8 bits.

    Attributes:
        name: Its name for users.
        input: The cast of x, in the forward and in the weight's gradient.
        weight: The cast of the weight in the forward.
        weight_for_dgrad: The cast of the weight in the gradient of x.
        grad: The cast of the gradient of y.
        has_fp8_wgrad: Whether the weight's gradient is an FP8 product.
        power_of_two: Whether training rounds scales up to powers of two.
    """

    name: str
    input: Cast
    weight: Cast
    weight_for_dgrad: Cast
    grad: Cast
    has_fp8_wgrad: bool
    power_of_two: bool


_ROW, _TENSOR = Cast(E4M3, "row"), Cast(E4M3, "tensor")
_VECTOR, _SQUARE = Cast(E4M3, "1x128"), Cast(E4M3, "128x128")
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("rowwise", _ROW, _ROW, _ROW, _ROW, True, True),
        Recipe("tensorwise", _TENSOR, _TENSOR, _TENSOR, Cast(E5M2, "tensor"), True, False),
        Recipe("rowwise_with_gw_hp", _ROW, _ROW, _TENSOR, _ROW, False, True),
        Recipe("blockwise", _VECTOR, _SQUARE, _SQUARE, _VECTOR, False, True),
    )
}


def find(recipe: str) -> Recipe:
    """Return a recipe by its name.

    Raises:
        ValueError: If there is none of that name.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {tuple(RECIPES)}, got {recipe!r}")
    return RECIPES[recipe]


def scale_of(amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Return the scale of numbers up to amax, in float32; infinite or NaN like amax.

    Args:
        amax: The largest magnitudes.
        dtype: Type of the quantized numbers.
        power_of_two: Whether scales are rounded up to powers of two.
    """
    # A tensor: a GPU divides by a number as a product with its reciprocal, which rounds once more.
    largest = torch.full((), torch.finfo(dtype).max, dtype=torch.float32, device=amax.device)
    scale = amax.float().clamp_min(LEAST) / largest
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    rounded = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(scale.isfinite(), rounded, scale)


def quantize(v: Tensor, cast: Cast, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, and the scales by which its elements have to be multiplied.

    Args:
        v: Of shape `[M, K]`.
        cast: The target type and scaling.
        power_of_two: Whether scales are rounded up to powers of two.

    Returns:
        The matrix `[M, K]`, and scales in float32: `[M, 1]` for rows, `[1, 1]` for a tensor,
        `[M, ceil(K / 128)]` or `[ceil(M / 128), ceil(K / 128)]` for blocks.
    """
    rows = v.float()
    amax = _amax(rows, cast.scaling)
    largest = torch.finfo(cast.dtype).max
    if cast.scaling == "tensor" and not power_of_two:
        # Rounded like torchao: with the reciprocal scale, computed in float64.
        factor = (largest / amax.double().clamp_min(LEAST)).float()
        scale, q = factor.reciprocal(), rows * factor
    else:
        scale = scale_of(amax, cast.dtype, power_of_two)
        q = rows / spread(scale, cast.scaling, v.shape)
    # Older casts of PyTorch do not saturate; NaN stays NaN.
    return q.clamp(-largest, largest).to(cast.dtype), scale


def quantize_within(v: Tensor, cast: Cast, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result of `quantize` with a scale that is known before the numbers.

    Args:
        v: Of shape `[M, K]`.
        cast: The target type; scales are of rows or of the tensor.
        scale: A power of two. Numbers that it scales beyond the type's range become NaN.
    """
    q = v.float() / scale
    q = q.where(q.abs() <= torch.finfo(cast.dtype).max, torch.nan).to(cast.dtype)
    count = 1 if cast.scaling == "tensor" else v.shape[0]
    return q, torch.full((count, 1), scale, dtype=torch.float32, device=v.device)


def dequantize(q: Tensor, scale: Tensor, scaling: str, dtype: torch.dtype) -> Tensor:
    """Return the values of a matrix in FP8.

    Args:
        q: Of shape `[M, K]`.
        scale: Its scales.
        scaling: Which elements share a scale.
        dtype: The dtype of the result.
    """
    return q.to(dtype) * spread(scale, scaling, q.shape).to(dtype)


def _amax(v: Tensor, scaling: str) -> Tensor:
    if scaling == "row":
        return v.abs().amax(-1, keepdim=True)
    if scaling == "tensor":
        return v.abs().amax().reshape(1, 1)
    M, K = v.shape
    down = 1 if scaling == "1x128" else BLOCK
    padded = torch.nn.functional.pad(v.abs(), (0, -K % BLOCK, 0, -M % down))
    blocks = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // BLOCK, BLOCK)
    return blocks.amax((1, 3))


def spread(scale: Tensor, scaling: str, shape: torch.Size) -> Tensor:
    """Return scales in a shape that broadcasts against the matrix they belong to.

    Args:
        scale: The scales.
        scaling: Which elements share a scale.
        shape: The shape of the matrix.
    """
    if scaling in ("row", "tensor"):
        return scale
    M, K = shape
    wide = scale.repeat_interleave(BLOCK, 1)[:, :K]
    return wide if scaling == "1x128" else wide.repeat_interleave(BLOCK, 0)[:M]


def product(
    a: tuple[Tensor, Tensor],
    a_scaling: str,
    b: tuple[Tensor, Tensor],
    b_scaling: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return a b^T for the values of two matrices in FP8.

    Args:
        a: A matrix `[M, K]` and its scales.
        a_scaling: Which of its elements share a scale.
        b: A matrix `[N, K]` and its scales.
        b_scaling: Which of its elements share a scale.
        dtype: The dtype of the product.
    """
    return dequantize(*a, a_scaling, dtype) @ dequantize(*b, b_scaling, dtype).t()
