"""Whole blocks of transformers, whose norms this library fuses.

A block is attention and an MLP, each behind a norm and before a residual sum. Those whose names end
in "rotary" have the rotary embeddings, and norms of queries and keys, of the models that they are
of; the others have none. The gate of an MLP and what it gates come from one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import EPS, Input, Op, gamma, matrix, vector
from benchmarks.ops import OPS, Member, member
from benchmarks.parts import Parts
from benchmarks.shapes import Shape
from fused_norm.ops.rotary import rotate_heads


@dataclass(frozen=True)
class Kind:
    """What tells a block from others; its width and hidden size are those of the shape.

    Attributes:
        batch: Sequences.
        head: Features of a head.
        share: Heads of queries to one of keys and values.
        is_causal: Whether a token sees those before it only.
        is_gated: RMSNorm, SwiGLU and no biases, instead of LayerNorm, GELU and biases.
        is_modulated: Whether scale, shift and gate of each sequence modulate it (AdaLN).
        is_rotated: Whether queries and keys have rotary embeddings.
        has_head_norms: Whether each head of them has an RMSNorm before.
        heads: Heads of queries; 0 for as many as the width has.
    """

    batch: int
    head: int = 64
    share: int = 1
    is_causal: bool = False
    is_gated: bool = False
    is_modulated: bool = False
    is_rotated: bool = False
    has_head_norms: bool = False
    heads: int = 0


def _inputs(kind: Kind, shape: Shape) -> dict[str, Input]:
    """Return the inputs of a block in the order of its formula.

    Raises:
        ValueError: If the shape has other than whole heads and sequences.
    """
    width, hidden = shape.K, shape.N
    if width % (kind.head * kind.share) or shape.M % kind.batch:
        raise ValueError(
            f"expected M to be a multiple of {kind.batch} sequences and K of "
            f"{kind.head * kind.share} features of whole heads, got {shape}"
        )
    heads = kind.heads or width // kind.head
    projected = (heads + 2 * (heads // kind.share)) * kind.head
    gates = 2 if kind.is_gated else 1
    inputs = {"x": Input((kind.batch, shape.M // kind.batch, width))}
    if kind.is_modulated:
        for name in ("shift1", "scale1", "gate1", "shift2", "scale2", "gate2"):
            inputs[name] = Input((kind.batch, 1, width), std=0.3)
    has_bias = not kind.is_gated

    def norm(name: str) -> None:
        if not kind.is_modulated:
            inputs[f"{name}_weight"] = gamma(width)
            if has_bias:
                inputs[f"{name}_bias"] = vector(width)

    def linear(name: str, outputs: int, features: int) -> None:
        inputs[f"{name}_weight"] = matrix(outputs, features)
        if has_bias:
            inputs[f"{name}_bias"] = vector(outputs)

    norm("norm1")
    linear("qkv", projected, width)
    linear("out", width, heads * kind.head)
    norm("norm2")
    linear("fc1", gates * hidden, width)
    linear("fc2", width, hidden)
    if kind.has_head_norms:
        inputs |= {"q_norm": gamma(kind.head), "k_norm": gamma(kind.head)}
    return inputs


def _attention(kind: Kind, qkv: Tensor, turn: Callable[..., Tensor], *gammas: Tensor) -> Tensor:
    batch, tokens, projected = qkv.shape
    shared = projected // kind.head // (kind.share + 2)
    heads = qkv.view(batch, tokens, -1, kind.head)
    query, key, value = heads.split((shared * kind.share, shared, shared), 2)
    if kind.is_rotated:
        angles = _angles(tokens, kind.head, qkv)
        query, key = (
            turn(t, gamma, *angles)
            for t, gamma in zip((query, key), gammas or (None, None), strict=True)
        )
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=kind.is_causal, enable_gqa=kind.share > 1
    )
    return attended.transpose(1, 2).reshape(batch, tokens, -1)


_ANGLES: dict[Any, tuple[Tensor, Tensor]] = {}


def _angles(tokens: int, head: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions, which a model computes once for all blocks."""
    key = (tokens, head, like.dtype, like.device)
    if key not in _ANGLES:
        powers = torch.arange(0, head, 2, device=like.device, dtype=torch.float64) / head
        places = torch.arange(tokens, device=like.device, dtype=torch.float64)
        angles = torch.outer(places, 10000.0**-powers).repeat(1, 2)
        _ANGLES[key] = (angles.cos().to(like.dtype), angles.sin().to(like.dtype))
    return _ANGLES[key]


def _plain(kind: Kind, parts: Parts, x: Tensor, *parameters: Tensor) -> Tensor:
    (weight1, bias1, qkv, qkv_bias, out, out_bias) = parameters[:6]
    (weight2, bias2, fc1, fc1_bias, fc2, fc2_bias) = parameters[6:]
    projected = parts.linear(parts.layer_norm(x, weight1, bias1), qkv, qkv_bias)
    attended = _attention(kind, projected, parts.turn)
    total = parts.add(x, parts.linear(attended, out, out_bias))
    hidden = parts.gelu(parts.linear(parts.layer_norm(total, weight2, bias2), fc1, fc1_bias))
    return parts.add(total, parts.linear(hidden, fc2, fc2_bias))


def _gated(kind: Kind, parts: Parts, x: Tensor, *parameters: Tensor) -> Tensor:
    weight1, qkv, out, weight2, fc1, fc2, *of_heads = parameters
    projected = parts.linear(parts.rms_norm(x, weight1), qkv)
    attended = _attention(kind, projected, parts.turn, *of_heads)
    z, total = parts.add_rms_norm(parts.linear(attended, out), x, weight2)
    return parts.add(total, parts.linear(parts.swiglu(parts.linear(z, fc1)), fc2))


def _modulated(kind: Kind, parts: Parts, x: Tensor, *parameters: Tensor) -> Tensor:
    shift1, scale1, gate1, shift2, scale2, gate2 = parameters[:6]
    qkv, qkv_bias, out, out_bias, fc1, fc1_bias, fc2, fc2_bias = parameters[6:]
    z = parts.modulate(parts.layer_norm(x, None, None), scale1, shift1)
    attended = _attention(kind, parts.linear(z, qkv, qkv_bias), parts.turn)
    total = parts.add_gated(x, parts.linear(attended, out, out_bias), gate1)
    z = parts.modulate(parts.layer_norm(total, None, None), scale2, shift2)
    hidden = parts.gelu(parts.linear(z, fc1, fc1_bias))
    return parts.add_gated(total, parts.linear(hidden, fc2, fc2_bias), gate2)


def _turn_by_us(x: Tensor, gamma: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_heads(x, gamma, cos, sin, gamma is not None, EPS, 0.0, False)


def _plain_by_us(kind: Kind, fn: Any, x: Tensor, *parameters: Tensor) -> Tensor:
    (weight1, bias1, qkv, qkv_bias, out, out_bias) = parameters[:6]
    (weight2, bias2, fc1, fc1_bias, fc2, fc2_bias) = parameters[6:]
    first = {"norm_weight": weight1, "norm_bias": bias1, "eps": EPS}
    attended = _attention(kind, fn.norm_linear(x, qkv, qkv_bias, **first), _turn_by_us)
    total, statistics = fn.linear_add(attended, out, out_bias, x, eps=EPS)
    second = {"norm_weight": weight2, "norm_bias": bias2, "eps": EPS, "statistics": statistics}
    result: Tensor = fn.norm_mlp(
        total, fc1, fc1_bias, fc2, fc2_bias, activation="gelu", residual_out=total, **second
    )
    return result


def _gated_by_us(kind: Kind, fn: Any, x: Tensor, *parameters: Tensor) -> Tensor:
    weight1, qkv, out, weight2, fc1, fc2, *of_heads = parameters
    rms = {"normalization": "rms_norm", "eps": EPS}
    projected = fn.norm_linear(x, qkv, norm_weight=weight1, **rms)
    attended = _attention(kind, projected, _turn_by_us, *of_heads)
    total, statistics = fn.linear_add(attended, out, None, x, **rms)
    second = {"norm_weight": weight2, "statistics": statistics, **rms}
    result: Tensor = fn.norm_mlp(
        total, fc1, None, fc2, None, activation="swiglu", residual_out=total, **second
    )
    return result


def _modulated_by_us(kind: Kind, fn: Any, x: Tensor, *parameters: Tensor) -> Tensor:
    shift1, scale1, gate1, shift2, scale2, gate2 = parameters[:6]
    qkv, qkv_bias, out, out_bias, fc1, fc1_bias, fc2, fc2_bias = parameters[6:]
    projected = fn.norm_linear(x, qkv, qkv_bias, scale=scale1, shift=shift1, eps=EPS)
    attended = _attention(kind, projected, _turn_by_us)
    plain = {"normalization": None}
    total, _ = fn.linear_add(attended, out, out_bias, x, gate=gate1, **plain)
    second = {"scale": scale2, "shift": shift2, "eps": EPS, "activation": "gelu"}
    if torch.is_grad_enabled():
        # Its backward multiplies by the derivative of the activation as well.
        y = fn.norm_mlp(total, fc1, fc1_bias, fc2, fc2_bias, **second)
        return torch.addcmul(total, gate2, y)
    hidden = fn.norm_linear(total, fc1, fc1_bias, **second)
    result: Tensor = fn.linear_add(hidden, fc2, fc2_bias, total, gate=gate2, **plain)[0]
    return result


def _flops(kind: Kind, shape: Shape) -> int:
    tokens = shape.M // kind.batch
    matrices = sum(i.elements for i in _inputs(kind, shape).values() if i.is_matrix)
    width = kind.heads * kind.head or shape.K
    attention = 4 * shape.M * tokens * width // (2 if kind.is_causal else 1)
    return 2 * shape.M * matrices + attention


def _block(name: str, title: str, kind: Kind, *peers: str) -> Member:
    formula: Callable[..., Tensor] = _gated if kind.is_gated else _plain
    by_us: Callable[..., Tensor] = _gated_by_us if kind.is_gated else _plain_by_us
    if kind.is_modulated:
        formula, by_us = _modulated, _modulated_by_us
    return member(
        name,
        title,
        partial(_inputs, kind),
        lambda shape: {"y": shape.K},
        partial(formula, kind),
        "functional",
        partial(by_us, kind),
        peers,
        flops=partial(_flops, kind),
        statistics=2 if kind.is_gated else 4,
        is_block=True,
    )


_GATED = ("liger", "quack")
_HEADS: Any = {"is_rotated": True, "has_head_norms": True, "heads": 16}
BLOCKS: dict[Member, Shape] = {
    _block("vit-l", "ViT-L", Kind(64), "liger"): Shape(64 * 257, 1024, 4096),
    _block("gpt2-xl", "GPT-2 XL", Kind(8, is_causal=True), "liger"): Shape(8 * 1024, 1600, 6400),
    _block("whisper-large", "Whisper large", Kind(8), "liger"): Shape(8 * 1500, 1280, 5120),
    _block("gpt-4096", "GPT, 4096 wide", Kind(4, head=128, is_causal=True), "liger"): Shape(
        4 * 2048, 4096, 16384
    ),
    _block(
        "llama-8b", "LLaMA 8B", Kind(4, head=128, share=4, is_causal=True, is_gated=True), *_GATED
    ): Shape(4 * 2048, 4096, 14336),
    _block("llama-1b", "LLaMA 1B", Kind(4, share=4, is_causal=True, is_gated=True), *_GATED): Shape(
        4 * 2048, 2048, 8192
    ),
    _block(
        "qwen3-0.6b", "Qwen3 0.6B", Kind(8, share=2, is_causal=True, is_gated=True), *_GATED
    ): Shape(8 * 2048, 1024, 3072),
    _block(
        "llama-8b-rotary",
        "LLaMA 8B, rotary",
        Kind(4, head=128, share=4, is_causal=True, is_gated=True, is_rotated=True),
        *_GATED,
    ): Shape(4 * 2048, 4096, 14336),
    _block(
        "qwen3-0.6b-rotary",
        "Qwen3 0.6B, rotary",
        Kind(8, 128, 2, is_causal=True, is_gated=True, **_HEADS),
        *_GATED,
    ): Shape(8 * 2048, 1024, 3072),
    _block("dit-xl", "DiT-XL", Kind(32, head=72, is_modulated=True)): Shape(32 * 256, 1152, 4608),
}
# What a run may measure; a block has a shape of its own.
EVERY: dict[str, Op] = OPS | {block.op.name: block.op for block in BLOCKS}
SHAPES: dict[str, Shape] = {block.op.name: shape for block, shape in BLOCKS.items()}
