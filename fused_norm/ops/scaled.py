"""The ops of FP8 calls: norm + quantization, and products.

On Hopper in bfloat16, with scales for rows or for a tensor, the chain (chain/eight_bits_ops.h) runs
kernels; elsewhere PyTorch's ops do what `recipes.py` specifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import composition, recipes
from fused_norm.activations import activated, is_gate
from fused_norm.call import frozen
from fused_norm.composition import Operands, Spec, summed
from fused_norm.ops.eight_bits import MULTIPLE, in_8_bits, quantize, scales_of, serves
from fused_norm.ops.flops import count_flops
from fused_norm.ops.registration import define, is_compiling, is_forward_mode, unseen
from fused_norm.recipes import E4M3, Cast
from fused_norm.reference import widened

# NVIDIA's lowest compute capability with FP8 products.
_CAPABILITY = (8, 9)


def require_fp8(x: Tensor, weights: list[Tensor]) -> None:
    """Raise an error if there are no FP8 products on this device, or of such sizes.

    Args:
        x: Rows, on their device.
        weights: All weights that they multiply.

    Raises:
        RuntimeError: If there are none.
        NotImplementedError: If a weight is not a floating-point matrix, or in forward mode.
    """
    if is_forward_mode():
        # Quantization would drop tangents.
        raise NotImplementedError("FP8 products have no forward-mode derivatives")
    if x.is_cuda and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(x.device)
        if capability < _CAPABILITY:
            name = torch.cuda.get_device_name(x.device)
            raise RuntimeError(f"{name} multiplies no FP8: that takes an Ada, Hopper or newer GPU")
    for weight in weights:
        if weight.dim() != 2 or not weight.is_floating_point():
            raise NotImplementedError(
                f"FP8 takes weights of two dimensions, got {list(weight.shape)} of {weight.dtype}"
            )
        # Nothing would write a product of no features, and no numbers have no largest magnitude.
        if not all(weight.shape) or any(size % MULTIPLE for size in weight.shape):
            raise RuntimeError(
                f"FP8 needs features and outputs that are multiples of {MULTIPLE}, but got a "
                f"weight of shape {list(weight.shape)}"
            )


def _norm(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    weight_offset: float,
    scaling: str,
    power_of_two: bool,
) -> list[Tensor]:
    t = Operands(x, residual, gamma, beta)
    # Kernels quantize what has been rounded to the dtype of x.
    is_served = x.dtype is torch.bfloat16 and serves(x, scaling) and x.numel() > 0
    total = summed(t)
    spec, rows = Spec(normalization, eps=eps, weight_offset=weight_offset), total
    # PyTorch's norms on GPUs take no parameters of another dtype.
    if not is_served or any(v is not None and v.dtype is not x.dtype for v in (gamma, beta)):
        rows = widened(total)
        gamma, beta = (None if v is None else widened(v) for v in (gamma, beta))
    z = composition.normalized(spec, rows, t._replace(gamma=gamma, beta=beta))
    z = z.to(x.dtype) if is_served else z
    q, scale = quantize(z.reshape(-1, x.shape[-1]), Cast(E4M3, scaling), power_of_two)
    return [x.new_empty(0) if residual is None else total, q, scale]


def _fake_norm(x: Tensor, residual: Tensor | None, *rest: Any) -> list[Tensor]:
    K = x.shape[-1]
    M = x.numel() // max(K, 1)
    total = x.new_empty(x.shape if residual is not None else (0,))
    q = x.new_empty((M, K), dtype=E4M3)
    return [total, q, x.new_empty(scales_of((M, K), rest[-2]), dtype=torch.float32)]


def linear(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    scaling: str,
    weight_scaling: str,
    power_of_two: bool,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    up: Tensor | None = None,
    up_scale: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Return act(rows W^T + b) + residual, `[M, N]`, rounded once.

    Args:
        q: Rows in 8 bits, `[M, K]`.
        scale: Their scales.
        weight: `[N, K]`, in 8 bits if it has scales.
        weight_scale: Its scales, or None.
        scaling: Which elements of rows share a scale.
        weight_scaling: Which elements of weights share a scale.
        power_of_two: Whether scales are rounded up to powers of two.
        bias: `[N]`, or None.
        residual: `[M, N]`, or None; only without an activation.
        activation: One of ACTIVATIONS, or `""` for none.
        dtype: The dtype of the result.
        up: The weight of what a gate multiplies if it is separate, `[N, K]`.
        up_scale: Its scales, or None.
        up_bias: Its bias, or None.
    """
    by = (weight, weight_scale, up, up_scale, weight_scaling, power_of_two)
    weight, weight_scale, up, up_scale, are_kept = of_frozen(*by)
    operands = (q, scale, weight, weight_scale, scaling, weight_scaling, power_of_two)
    last = (bias, residual, activation, dtype, up, up_scale, up_bias, are_kept)
    y: Tensor = linear_op(*operands, *last)
    return y


def of_frozen(
    weight: Tensor,
    weight_scale: Tensor | None,
    up: Tensor | None,
    up_scale: Tensor | None,
    weight_scaling: str,
    power_of_two: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, bool]:
    """Return a weight and the one it gates, if any, with their scales, like `in_8_bits`.

    Args:
        weight: `[N, K]`, in 8 bits if it has scales.
        weight_scale: Its scales, or None.
        up: The weight that it gates, or None.
        up_scale: The scales of `up`, or None.
        weight_scaling: Which elements share a scale.
        power_of_two: Whether scales are rounded up to powers of two.

    Returns:
        These four, and whether earlier calls made everything that is in 8 bits.
    """
    if is_compiling() or not frozen.is_any():
        return weight, weight_scale, up, up_scale, False
    weights = [weight] if up is None else [weight, up]
    scales = [weight_scale, up_scale][: len(weights)]
    made, scales, are_kept = in_8_bits(weights, scales, weight_scaling, power_of_two)
    if up is None:
        return made[0], scales[0], None, None, are_kept
    return made[0], scales[0], made[1], scales[1], are_kept


def _linear(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor | None, *rest: Any
) -> Tensor:
    scaling, by, power_of_two, bias, residual, activation, dtype, up, up_scale, up_bias, _ = rest
    how = (scaling, by, power_of_two)
    if frozen.is_any() and weight_scale is None:
        return linear(q, scale, weight, weight_scale, *rest[:-1])
    if not q.numel():
        return fake_linear(q, scale, weight, weight_scale, *rest)
    y = multiply(q, scale, weight, weight_scale, *how, bias, dtype)
    if up is not None:
        y = torch.cat([y, multiply(q, scale, up, up_scale, *how, up_bias, dtype)], -1)
    if activation:
        return activated(activation, y).to(dtype)
    return (y if residual is None else y + residual).to(dtype)


def multiply(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    scaling: str,
    weight_scaling: str,
    power_of_two: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return rows W^T + b with PyTorch's ops, in float32.

    Args:
        q: Rows in 8 bits, `[M, K]`.
        scale: Their scales.
        weight: `[N, K]`, in 8 bits if it has scales.
        weight_scale: Its scales, or None.
        scaling: Which elements of rows share a scale.
        weight_scaling: Which elements of the weight share a scale.
        power_of_two: Whether scales are rounded up to powers of two.
        bias: `[N]`, or None.
        dtype: The dtype of a GPU's product.
    """
    if weight_scale is None:
        weight, weight_scale = quantize(weight, Cast(E4M3, weight_scaling), power_of_two)
    wide, by = dtype if q.is_cuda else torch.float32, (weight, weight_scale)
    y = recipes.product((q, scale), scaling, by, weight_scaling, wide).float()
    return y if bias is None else y + bias.float()


def linears(
    q: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor | None],
    scaling: str,
    weight_scaling: str,
    power_of_two: bool,
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return rows W^T + b, `[M, N]`, for each of several W: like `linear`, in one launch if faster.

    Args:
        q: Rows in 8 bits, `[M, K]`.
        scale: Their scales.
        weights: Each of shape `[N, K]`, in 8 bits if it has scales.
        weight_scales: For each its scales, or None.
        scaling: Which elements of rows share a scale.
        weight_scaling: Which elements of weights share a scale.
        power_of_two: Whether scales are rounded up to powers of two.
        biases: For each one of shape `[N]`, or None.
        dtype: The dtype of the results.
    """
    are_kept = False
    if not is_compiling() and frozen.is_any():
        how = (weight_scaling, power_of_two)
        weights, weight_scales, are_kept = in_8_bits(weights, weight_scales, *how)
    operands = (q, scale, [*weights], [*weight_scales], scaling, weight_scaling, power_of_two)
    found: list[Tensor] = _linears_op(*operands, [*biases], dtype, are_kept)
    return found


def _linears(
    q: Tensor,
    scale: Tensor,
    weights: Sequence[Tensor],
    weight_scales: Sequence[Tensor | None],
    *rest: Any,
) -> list[Tensor]:
    scaling, by, power_of_two, biases, dtype, _ = rest
    how = (scaling, by, power_of_two)
    if frozen.is_any() and any(own is None for own in weight_scales):
        return linears(q, scale, weights, weight_scales, *rest[:-1])
    if not q.numel():
        return _fake_linears(q, scale, weights, weight_scales, *rest)
    layers = zip(weights, weight_scales, biases, strict=True)
    return [multiply(q, scale, w, s, *how, b, dtype).to(dtype) for w, s, b in layers]


def _fake_linears(q: Tensor, _: Tensor, weights: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    dtype = rest[5]
    return [q.new_empty((q.shape[0], len(weight)), dtype=dtype) for weight in weights]


def fake_linear(q: Tensor, _: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return a fake result of the op of `linear`, from its arguments."""
    activation, dtype, up = rest[6:9]
    N = len(weight) // (2 if is_gate(activation) and up is None else 1)
    return q.new_empty((q.shape[0], N), dtype=dtype)


norm = define(
    "fp8_norm(Tensor x, Tensor? residual, Tensor? gamma, Tensor? beta, str normalization, "
    "float eps, float weight_offset, str scaling, bool power_of_two) -> Tensor[]",
    _fake_norm,
    unseen(_norm),
)
linear_op = define(
    "fp8_linear(Tensor q, Tensor scale, Tensor weight, Tensor? weight_scale, str scaling, "
    "str weight_scaling, bool power_of_two, Tensor? bias, Tensor? residual, str activation, "
    "ScalarType dtype, Tensor? up, Tensor? up_scale, Tensor? up_bias, bool are_kept) -> Tensor",
    fake_linear,
    unseen(_linear),
)
_linears_op = define(
    "fp8_linears(Tensor q, Tensor scale, Tensor[] weights, Tensor?[] weight_scales, str scaling, "
    "str weight_scaling, bool power_of_two, Tensor?[] biases, ScalarType dtype, bool are_kept) "
    "-> Tensor[]",
    _fake_linears,
    unseen(_linears),
)


def linear_flops(q: Tensor, _: Tensor, weight: Tensor, *rest: Any) -> int:
    """Return the operations of the products: of one layer, or two if `up` is given."""
    up = rest[-4]
    return 2 * q.numel() * (len(weight) + (0 if up is None else len(up)))


count_flops("fp8_linear", linear_flops)
count_flops(
    "fp8_linears", lambda q, _, weights, *rest: 2 * q.numel() * sum(len(w) for w in weights)
)
