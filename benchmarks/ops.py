"""What is measured: the ops of the family, an entry each, and LayerNorm as a row program.

An entry says what a user of PyTorch writes, of `parts` that other projects have too, and which call
of ours takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import EPS, Formula, Input, Op, Outputs, gamma, matrix, rows, vector
from benchmarks.parts import TORCH, Parts
from benchmarks.shapes import Shape
from fused_norm import reference

# The trained eps of the row program: far from 0 and from 1, so that a lost one shows.
SCALE = 0.25
_RMS: Any = {"normalization": "rms_norm", "eps": EPS}
# Images or sequences, each of which has a scale and a shift of its own.
BATCH = 8


@dataclass(frozen=True)
class Member:
    """A member of the op family.

    Attributes:
        op: What is measured.
        formula: Computes it from parts and the inputs.
        function: Name of our function.
        ours: Computes it from that function and the inputs.
        peers: Who else computes it: names of `peers.PEERS`.
        is_block: Whether it is all of a transformer's block, and not one op of it.
    """

    op: Op
    formula: Callable[..., Outputs]
    function: str
    ours: Formula
    peers: tuple[str, ...]
    is_block: bool = False


def member(
    name: str,
    title: str,
    inputs: Callable[[Shape], dict[str, Input]],
    outputs: Callable[[Shape], dict[str, int]],
    formula: Callable[..., Outputs],
    function: str,
    ours: Formula,
    peers: tuple[str, ...] = (),
    is_block: bool = False,
    **work: Any,
) -> Member:
    """Return the entry of a member, which eager computes of PyTorch's parts."""
    op = Op(name, title, inputs, outputs, partial(formula, TORCH), **work)
    return Member(op, formula, function, ours, peers, is_block)


def _layernorm_linear(
    parts: Parts, x: Tensor, ln_weight: Tensor, ln_bias: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return F.linear(parts.layer_norm(x, ln_weight, ln_bias), weight, bias)


def _rms_norm_linear(parts: Parts, x: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
    return F.linear(parts.rms_norm(x, norm_weight), weight)


def _residual_rms_norm_linear(
    parts: Parts, x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    z, total = parts.add_rms_norm(x, residual, norm_weight)
    return F.linear(z, weight), total


def _norm_gelu(
    parts: Parts, x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return parts.gelu(F.linear(parts.layer_norm(x, norm_weight, norm_bias), weight, bias))


def _norm_swiglu(parts: Parts, x: Tensor, norm_weight: Tensor, weight: Tensor) -> Tensor:
    return parts.swiglu(F.linear(parts.rms_norm(x, norm_weight), weight))


def _norm_qkv(parts: Parts, x: Tensor, norm_weight: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    z = parts.rms_norm(x, norm_weight)
    return tuple(F.linear(z, weight) for weight in weights)


def _norm_mlp(
    parts: Parts, x: Tensor, norm_weight: Tensor, fc1_weight: Tensor, fc2_weight: Tensor
) -> Tensor:
    h = F.linear(parts.rms_norm(x, norm_weight), fc1_weight)
    return parts.add(x, F.linear(parts.swiglu(h), fc2_weight))


def _adaln_linear(
    parts: Parts, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    z = parts.modulate(parts.layer_norm(x, None, None), scale, shift)
    return F.linear(z, weight, bias)


def _affine(shape: Shape, weight: str, bias: str, linear_weight: str, linear_bias: str) -> Any:
    return {
        "x": rows(shape),
        weight: gamma(shape.K),
        bias: vector(shape.K),
        linear_weight: matrix(shape.N, shape.K),
        linear_bias: vector(shape.N),
    }


def _heads(name: str, title: str, groups: int) -> Member:
    """Return the projections to queries and to keys and values, of which there are fewer."""

    def widths(shape: Shape) -> dict[str, int]:
        shared = max(shape.N // groups, 1)
        return {"query": shape.N, "key": shared, "value": shared}

    return member(
        name,
        title,
        lambda s: {
            "x": rows(s),
            "norm_weight": gamma(s.K),
            **{f"{part}_weight": matrix(width, s.K) for part, width in widths(s).items()},
        },
        widths,
        _norm_qkv,
        "norm_linear",
        lambda call, x, gamma, *weights: call(x, weights, norm_weight=gamma, **_RMS),
        ("liger", "quack", "transformer-engine"),
        statistics=1,
    )


def _adaln_inputs(shape: Shape) -> dict[str, Input]:
    batch = math.gcd(shape.M, BATCH)
    modulation = Input((batch, 1, shape.K), std=0.3)
    return {
        "x": Input((batch, shape.M // batch, shape.K)),
        "scale": modulation,
        "shift": modulation,
        "weight": matrix(shape.N, shape.K),
        "bias": vector(shape.N),
    }


MEMBERS: tuple[Member, ...] = (
    member(
        "layernorm_linear",
        "LayerNorm + Linear",
        lambda s: _affine(s, "ln_weight", "ln_bias", "linear_weight", "linear_bias"),
        lambda s: {"y": s.N},
        _layernorm_linear,
        "fused_layernorm_linear",
        lambda call, *inputs: call(*inputs),
        ("fla", "liger", "transformer-engine", "max-fused", "max-unfused"),
    ),
    member(
        "rms_norm_linear",
        "RMSNorm + Linear",
        lambda s: {"x": rows(s), "norm_weight": gamma(s.K), "weight": matrix(s.N, s.K)},
        lambda s: {"y": s.N},
        _rms_norm_linear,
        "norm_linear",
        lambda call, x, gamma, weight: call(x, weight, norm_weight=gamma, **_RMS),
        ("fla", "liger", "quack", "transformer-engine"),
        statistics=1,
    ),
    member(
        "residual_rms_norm_linear",
        "residual + RMSNorm + Linear",
        lambda s: {
            "x": rows(s),
            "residual": rows(s)._replace(is_summand=True),
            "norm_weight": gamma(s.K),
            "weight": matrix(s.N, s.K),
        },
        lambda s: {"y": s.N, "sum": s.K},
        _residual_rms_norm_linear,
        "norm_linear",
        lambda call, x, residual, gamma, weight: call(
            x, weight, norm_weight=gamma, residual=residual, return_sum=True, **_RMS
        ),
        ("fla", "liger", "quack"),
        statistics=1,
    ),
    member(
        "norm_gelu",
        "LayerNorm + Linear + GELU",
        lambda s: _affine(s, "norm_weight", "norm_bias", "weight", "bias"),
        lambda s: {"y": s.N},
        _norm_gelu,
        "norm_linear",
        lambda call, x, gamma, beta, weight, bias: call(
            x, weight, bias, norm_weight=gamma, norm_bias=beta, eps=EPS, activation="gelu"
        ),
        ("liger",),
    ),
    member(
        "norm_swiglu",
        "RMSNorm + Linear + SwiGLU",
        lambda s: {"x": rows(s), "norm_weight": gamma(s.K), "weight": matrix(2 * s.N, s.K)},
        lambda s: {"y": s.N},
        _norm_swiglu,
        "norm_linear",
        lambda call, x, gamma, weight: call(
            x, weight, norm_weight=gamma, activation="swiglu", **_RMS
        ),
        ("liger", "quack"),
        statistics=1,
    ),
    _heads("norm_qkv", "RMSNorm + Linear to N, N/4 and N/4", 4),
    _heads("norm_qkv_equal", "RMSNorm + Linear to N, N and N", 1),
    member(
        "norm_mlp",
        "x + MLP(RMSNorm(x)) with SwiGLU, N hidden",
        lambda s: {
            "x": rows(s),
            "norm_weight": gamma(s.K),
            "fc1_weight": matrix(2 * s.N, s.K),
            "fc2_weight": matrix(s.K, s.N),
        },
        lambda s: {"y": s.K},
        _norm_mlp,
        "norm_mlp",
        lambda call, x, gamma, fc1, fc2: call(
            x, fc1, None, fc2, norm_weight=gamma, activation="swiglu", residual_out=x, **_RMS
        ),
        ("liger", "quack", "transformer-engine"),
        statistics=1,
    ),
    member(
        "adaln_linear",
        "LayerNorm, scale and shift, Linear",
        _adaln_inputs,
        lambda s: {"y": s.N},
        _adaln_linear,
        "norm_linear",
        lambda call, x, scale, shift, weight, bias: call(
            x, weight, bias, scale=scale, shift=shift, eps=EPS
        ),
    ),
)
LAYER_NORM = Op(
    name="layer_norm",
    title="LayerNorm as a row program",
    inputs=lambda s: {"x": rows(s), "o": Input((1,), mean=SCALE, std=0.0, is_scalar=True)},
    outputs=lambda s: {"y": s.K},
    reference=reference.trainable_eps_layer_norm,
    # Sum, center, square, sum, divide.
    flops=lambda s: 5 * s.M * s.K,
    has_outputs=False,
)
OPS: dict[str, Op] = {
    op.name: op for op in (MEMBERS[0].op, LAYER_NORM, *(m.op for m in MEMBERS[1:]))
}
