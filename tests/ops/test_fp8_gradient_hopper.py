"""Hopper's kernel of a product in 8 bits that stores the gradient of an activation's input."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from fp8_products import decibels
from kernel_harness import Guarded
from test_fp8_blocks import on_hopper
from torch import Tensor

from fused_norm import recipes
from fused_norm.activations import ACTIVATIONS, activation_gradient, is_gate, number_of
from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.recipes import E4M3, E5M2, Cast

pytestmark = on_hopper
BF16, F32 = torch.bfloat16, torch.float32
# Those that the kernel has one formula for.
SMOOTH = [name for name in ACTIVATIONS if "re" not in name]
# Rows of a tile and of many, ragged; columns that fill no box and no tile; sums that fill no slot.
SHAPES = [(1, 16, 16), (5, 64, 128), (129, 1040, 272), (300, 144, 1024), (1000, 208, 48)]
SHAPES += [(4097, 2048, 1024), (2050, 4112, 64)]


def computed(
    rows: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    h: Tensor,
    activation: str,
    layers: int,
    one_scale: bool,
) -> tuple[Tensor, Tensor]:
    """Return dh `[layers, M, .]` and its maxima, a row for each layer; no more is written."""
    (M, K), N = rows[0].shape, len(weight[0])
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    stream = torch.cuda.current_stream().cuda_stream
    module, context = kernels.launcher(extension, 0, stream, True)
    width = h.shape[1] // layers
    count = 1 if one_scale else M + width
    dh = Guarded((layers, M, width), BF16, "cuda")
    maxima = Guarded((layers, (count + 3) // 4 * 4), torch.int32, "cuda")
    maxima.tensor.zero_()
    call = Call(M=M, N=N, K=K, context=context, part_count=layers, one_scale=one_scale)
    call.eight_bits = 5 if rows[0].dtype is E5M2 else 4
    call.activation = number_of(activation)
    call.z, call.z_scale = (v.data_ptr() for v in rows)
    call.weight, call.weight_scale = (v.data_ptr() for v in weight)
    call.h, call.dh, call.workspace = (v.data_ptr() for v in (h, dh.tensor, maxima.tensor))
    module.linear(ctypes.addressof(call))
    torch.cuda.synchronize()
    return dh.checked(), maxima.checked()[:, :count]


def operands(
    M: int, N: int, K: int, activation: str, dtype: Any = E4M3
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Return gradients and a weight in 8 bits with their scales, and h."""
    torch.manual_seed(M + N + K)
    dy = torch.randn(M, K, device="cuda") * torch.randn(M, 1, device="cuda").exp()
    w = torch.randn(N, K, device="cuda") * torch.randn(N, 1, device="cuda").exp() / K**0.5
    h = torch.randn(M, N * (1 + is_gate(activation)), device="cuda") * 2
    rows = recipes.quantize(dy.to(BF16), Cast(dtype, "row"), False)
    return rows, recipes.quantize(w.to(BF16), Cast(E4M3, "row"), False), h.to(BF16)


def assert_near(found: Tensor, rows: Any, weight: Any, h: Tensor, activation: str) -> None:
    """Compare with the gradient of the product of the same kernel, which has da rounded once."""
    alone: Any = ("row", "row", False, None, None, "", BF16, None, None, None, False)
    da, h = torch.ops.fused_norm.fp8_linear(*rows, *weight, *alone).double(), h.double()
    exact = rows[0].double() * rows[1].double() @ (weight[0].double() * weight[1].double()).t()
    assert decibels(exact, da) > 45
    expected = activation_gradient(activation, da, h)
    if is_gate(activation):
        gate, up = h.chunk(2, -1)
        da = torch.cat([da * up, da * gate], -1)
    # Two roundings, and a curve whose slope is near to its own where that is 0.
    error, scale = (found.double() - expected).abs(), expected.abs() + 0.05 * da.abs()
    assert (error <= 2**-7 * scale).all(), (error / scale).max()


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("one_scale", [False, True])
def test_gradients_and_their_maxima(activation: str, dtype: Any, one_scale: bool) -> None:
    for M, N, K in SHAPES:
        rows, weight, h = operands(M, N, K, activation, dtype)
        for layers in (1, 2) if is_gate(activation) else (1,):
            given = (rows, weight, h, activation, layers, one_scale)
            found, maxima = computed(*given)
            joined = torch.cat([*found], 1)
            assert_near(joined, rows, weight, h, activation)
            for own, kept in zip(found, maxima, strict=True):
                sizes = own.abs()
                most = (
                    sizes.amax().reshape(1)
                    if one_scale
                    else torch.cat([sizes.amax(0), sizes.amax(1)])
                )
                assert torch.equal(kept, most.view(torch.int16).to(torch.int32))
            again, kept_again = computed(*given)
            assert torch.equal(found, again)
            assert torch.equal(maxima, kept_again)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_and_column(activation: str, number: float) -> None:
    M, N, K = 300, 208, 64
    rows, weight, h = operands(M, N, K, activation)
    clean, _ = computed(rows, weight, h, activation, 1, False)
    # Of a gate, what is multiplied by it: the kernel reads it next to the last gates.
    h[7, -N + 3] = number
    found, maxima = computed(rows, weight, h, activation, 1, False)
    others = torch.arange(M, device="cuda") != 7
    assert torch.equal(found[0][others], clean[0][others])
    assert not found[0][7].isfinite().all()
    seen = maxima[0].to(torch.int16).view(BF16)
    columns = found[0].isfinite().all(0)
    assert torch.equal(seen[: len(columns)].isfinite(), columns)
    assert torch.equal(seen[len(columns) :].isfinite(), found[0].isfinite().all(1))
