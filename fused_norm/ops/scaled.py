"""What FP8 calls are made of, as PyTorch knows it: norm + quantization, and products.

On Hopper in bfloat16, with scales for rows or for a tensor, kernels compute them; elsewhere
PyTorch's ops do what `recipes.py` says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_norm import composition, recipes
from fused_norm.activations import is_gate, number_of
from fused_norm.call import frozen
from fused_norm.call.record import FUSED, Part
from fused_norm.chain import kernels
from fused_norm.composition import Operands, Spec, summed
from fused_norm.norms import NORMS
from fused_norm.ops.eight_bits import MULTIPLE, TYPES, quantize, run, scales_of, serves
from fused_norm.ops.flops import count_flops
from fused_norm.ops.registration import define_in_python
from fused_norm.recipes import E4M3, Cast
from fused_norm.reference import widened

# The least of NVIDIA's that multiplies FP8.
_CAPABILITY = (8, 9)
# Layers that one launch has at most.
_MOST_PARTS = 3


def require_fp8(x: Tensor, weights: list[Tensor]) -> None:
    """Raise an error if there are no FP8 products on this device, or of such sizes.

    Args:
        x: Rows, on their device.
        weights: All that they multiply.

    Raises:
        RuntimeError: If there are none.
        NotImplementedError: If a weight is no matrix of a floating-point type.
    """
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
        if any(size % MULTIPLE for size in weight.shape):
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
    is_served = x.dtype is torch.bfloat16 and serves(x, scaling) and x.numel() > 0
    if not is_served or scaling != "row":
        total = summed(t)
        spec, rows = Spec(normalization, eps=eps, weight_offset=weight_offset), total
        # PyTorch's norms take no parameters of another dtype on GPUs.
        if not is_served or any(v is not None and v.dtype is not x.dtype for v in (gamma, beta)):
            rows = widened(total)
            gamma, beta = (None if v is None else widened(v) for v in (gamma, beta))
        z = composition.normalized(spec, rows, t._replace(gamma=gamma, beta=beta))
        z = z.to(x.dtype) if is_served else z
        q, scale = quantize(z.reshape(-1, x.shape[-1]), Cast(E4M3, scaling), power_of_two)
        return [x.new_empty(0) if residual is None else total, q, scale]
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    gamma, beta = kernels.in_aligned_memory(gamma, beta)
    K = x.shape[-1]
    M = x.numel() // K
    total = torch.empty_like(x) if residual is not None else x.new_empty(0)
    q = x.new_empty((M, K), dtype=E4M3)
    scale, mean, rstd = (x.new_empty(size, dtype=torch.float32) for size in ((M, 1), (M,), (M,)))
    affine = gamma if gamma is not None else beta
    wide_norm = affine is not None and affine.dtype is torch.float32
    run(
        "normalize",
        x.device,
        **{"M": M, "K": K, "x": x, "residual": residual, "gamma": gamma, "beta": beta},
        **{"normalization": NORMS[normalization].number, "eps": eps},
        **{"weight_offset": weight_offset, "z": q, "z_scale": scale, "mean": mean, "rstd": rstd},
        **{"sum": total if residual is not None else None, "norm_is_float32": wide_norm},
        power_of_two=power_of_two,
    )
    return [total, q, scale]


def _fake_norm(x: Tensor, residual: Tensor | None, *rest: Any) -> list[Tensor]:
    K = x.shape[-1]
    M = x.numel() // max(K, 1)
    total = x.new_empty(x.shape if residual is not None else (0,))
    q = x.new_empty((M, K), dtype=E4M3)
    return [total, q, x.new_empty(scales_of((M, K), rest[-2]), dtype=torch.float32)]


def _of_weight(
    weight: Tensor, scaling: str, power_of_two: bool, turned: bool = False
) -> tuple[Tensor, Tensor, bool]:
    """Return a weight in e4m3, its scales, and whether an earlier call made them, of one frozen.

    It is transposed for gradients.
    """
    cast, made = Cast(E4M3, scaling), list[Tensor]()

    def make() -> tuple[Tensor, ...]:
        made.extend(quantize(weight, cast, power_of_two, plain=not turned, turned=turned))
        return tuple(made)

    if found := frozen.find([weight], meets=not turned):
        record, keys = found
        name = ("fp8", scaling, power_of_two, turned)
        kept = record.prepared(name, keys, make, weight.device)
        if kept is not None:
            q, scale = kept.tensors
            return q, scale, not made
    q, scale = make()
    return q, scale, False


def _linear(
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
    turned: bool = False,
) -> Tensor:
    is_kept = is_up_kept = False
    if weight_scale is None:
        weight, weight_scale, is_kept = _of_weight(weight, weight_scaling, power_of_two, turned)
    (M, K), N = q.shape, weight.shape[0]
    if up is not None and up_scale is None:
        up, up_scale, is_up_kept = _of_weight(up, weight_scaling, power_of_two)
        is_kept = is_kept and is_up_kept
    if dtype is not torch.bfloat16 or not serves(q, scaling, weight_scaling) or not M:
        wide = dtype if q.is_cuda else torch.float32
        layers = [(weight, weight_scale, bias)]
        if up is not None and up_scale is not None:
            layers.append((up, up_scale, up_bias))
        parts = []
        for w, w_scale, b in layers:
            y = recipes.product((q, scale), scaling, (w, w_scale), weight_scaling, wide).float()
            parts.append(y if b is None else y + b.float())
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if activation:
            return composition.activated(activation, y).to(dtype)
        return (y if residual is None else y + residual.float()).to(dtype)
    # One scale of a tensor is one of each row.
    scale, weight_scale = scale.expand(M, 1).contiguous(), weight_scale.expand(N, 1).contiguous()
    (bias,) = kernels.in_aligned_memory(bias)
    outputs = N // 2 if is_gate(activation) and up is None else N
    fields: dict[str, Any] = {}
    if up is not None and up_scale is not None:
        (up_bias,) = kernels.in_aligned_memory(up_bias)
        fields = {"up": up, "up_scale": up_scale.expand(N, 1).contiguous(), "up_bias": up_bias}
    elif is_gate(activation):
        fields = {"up": weight[outputs:], "up_scale": weight_scale[outputs:]}
        fields["up_bias"] = None if bias is None else bias[outputs:]
    y = q.new_empty((M, outputs), dtype=dtype)
    run(
        "linear",
        q.device,
        **{"M": M, "N": outputs, "K": K, "z": q, "z_scale": scale, "y": y, "bias": bias},
        **{"weight": weight, "weight_scale": weight_scale},
        **{"activation": number_of(activation), "eight_bits": TYPES[q.dtype]},
        # Only then was the weight there before the rows were.
        strategy=FUSED if is_kept else 0,
        **fields,
    )
    return y if residual is None else y.add_(residual)


def _linears(
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
    (M, K), count = q.shape, len(weights)
    how = (scaling, weight_scaling, power_of_two)
    has_biases = len({bias is None for bias in biases}) == 1
    is_served = dtype is torch.bfloat16 and serves(q, scaling, weight_scaling) and M > 0
    if not (is_served and has_biases and count <= _MOST_PARTS and q.dtype is E4M3):
        layers = zip(weights, weight_scales, biases, strict=True)
        return [_linear(q, scale, w, s, *how, b, None, "", dtype) for w, s, b in layers]
    parts, held = (Part * count)(), list[Tensor | None]()
    outputs, are_kept = [], True
    for i, (weight, own) in enumerate(zip(weights, weight_scales, strict=True)):
        if own is None:
            weight, own, is_kept = _of_weight(weight, weight_scaling, power_of_two)
            are_kept = are_kept and is_kept
        else:
            are_kept = False
        own = own.expand(len(weight), 1).contiguous()
        (bias,) = kernels.in_aligned_memory(biases[i])
        y = q.new_empty((M, len(weight)), dtype=dtype)
        tensors = {"weight": weight, "scale": own, "bias": bias, "y": y}
        parts[i] = Part(
            N=len(weight), **{name: v.data_ptr() for name, v in tensors.items() if v is not None}
        )
        # The kernel is queued behind what frees their memory.
        held += tensors.values()
        outputs.append(y)
    fields = {"z": q, "z_scale": scale.expand(M, 1).contiguous(), "eight_bits": TYPES[E4M3]}
    run(
        "linears",
        q.device,
        **{"M": M, "N": sum(part.N for part in parts), "K": K, **fields},
        **{"parts": ctypes.addressof(parts), "part_count": count},
        strategy=FUSED if are_kept else 0,
    )
    return outputs


def _fake_linears(q: Tensor, _: Tensor, weights: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [q.new_empty((q.shape[0], len(weight)), dtype=rest[-1]) for weight in weights]


def _fake_linear(q: Tensor, _: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    # What is left out of the end is None.
    activation, dtype, up, *others = (*rest[6:], None)
    N = weight.shape[1] if others[2:3] == [True] else weight.shape[0]
    N //= 2 if is_gate(activation) and up is None else 1
    return q.new_empty((q.shape[0], N), dtype=dtype)


norm = define_in_python(
    "fp8_norm(Tensor x, Tensor? residual, Tensor? gamma, Tensor? beta, str normalization, "
    "float eps, float weight_offset, str scaling, bool power_of_two) -> Tensor[]",
    _norm,
    _fake_norm,
)
linear = define_in_python(
    "fp8_linear(Tensor q, Tensor scale, Tensor weight, Tensor? weight_scale, str scaling, "
    "str weight_scaling, bool power_of_two, Tensor? bias, Tensor? residual, str activation, "
    "ScalarType dtype, Tensor? up=None, Tensor? up_scale=None, Tensor? up_bias=None, "
    "bool turned=False) -> Tensor",
    _linear,
    _fake_linear,
)
linears = define_in_python(
    "fp8_linears(Tensor q, Tensor scale, Tensor[] weights, Tensor?[] weight_scales, str scaling, "
    "str weight_scaling, bool power_of_two, Tensor?[] biases, ScalarType dtype) -> Tensor[]",
    _linears,
    _fake_linears,
)


def _linear_flops(q: Tensor, _: Tensor, weight: Tensor, *rest: Any) -> int:
    # What is left out of the end is None.
    up, *others = (*rest[8:], None)
    outputs: int = weight.shape[1] if others[2:3] == [True] else weight.shape[0]
    return 2 * q.numel() * (outputs + (0 if up is None else up.shape[0]))


count_flops("fp8_linear", _linear_flops)
count_flops(
    "fp8_linears", lambda q, _, weights, *rest: 2 * q.numel() * sum(len(w) for w in weights)
)
