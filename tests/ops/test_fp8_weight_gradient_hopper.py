"""Hopper's gradients of weights in 8 bits: sums over all rows, added up in float32."""

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
from fused_norm.call.record import Call, Part
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.ops.scaled_layers import layers_backward
from fused_norm.recipes import E4M3, E5M2, Cast

pytestmark = on_hopper
BF16 = torch.bfloat16
# Of one tile and of many, ragged; sums that fill no slot, not all that is added up at once, and
# many times that. The last ones are in tiles of 64, 128 and 208 columns on 132 SMs.
SHAPES = [(16, 16, 16), (144, 1040, 48), (272, 208, 512), (48, 4112, 528), (1040, 144, 16448)]
SHAPES += [(1024, 1024, 2064), (4096, 1024, 8192), (4096, 4608, 1040)]


def operands(M: int, N: int, K: int, dtype: Any) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return columns of gradients and of rows, whose products add up rather than cancel."""
    torch.manual_seed(M + N + K)
    columns = (torch.randn(M, K, device="cuda") + 1) * torch.randn(M, 1, device="cuda").exp()
    rows = (torch.randn(N, K, device="cuda") + 1) * torch.randn(N, 1, device="cuda").exp()
    given = ((columns, dtype), (rows, E4M3))
    first, second = (recipes.quantize(v.to(BF16), Cast(d, "row"), True) for v, d in given)
    return first, second


def computed(
    columns: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], *outputs: int
) -> tuple[Tensor, ...]:
    """Return dweight of layers with these outputs, or of one; no more is written."""
    (M, K), N = columns[0].shape, len(rows[0])
    outputs = outputs or (M,)
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    stream = torch.cuda.current_stream().cuda_stream
    module, context = kernels.launcher(extension, 0, stream, True)
    dweights = [Guarded((own, N), BF16, "cuda") for own in outputs]
    parts = (Part * len(outputs))()
    for part, own, dweight in zip(parts, outputs, dweights, strict=True):
        part.N, part.y = own, dweight.tensor.data_ptr()
    call = Call(M=M, N=N, K=K, context=context)
    call.eight_bits = 5 if columns[0].dtype is E5M2 else 4
    call.z, call.z_scale = (v.data_ptr() for v in columns)
    call.weight, call.weight_scale = (v.data_ptr() for v in rows)
    call.dweight, call.parts, call.part_count = parts[0].y, ctypes.addressof(parts), len(parts)
    module.linear(ctypes.addressof(call))
    torch.cuda.synchronize()
    return tuple(dweight.checked() for dweight in dweights)


def exact(columns: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return what it is of numbers that are in 8 bits already."""
    first, second = (q.double() * scale.double() for q, scale in (columns, rows))
    return first @ second.t()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums(shape: tuple[int, int, int], dtype: Any) -> None:
    columns, rows = operands(*shape, dtype)
    (found,), expected = computed(columns, rows), exact(columns, rows)
    # Twice what bfloat16 loses of the result at most.
    error = (found.double() - expected).abs()
    assert (error <= 2**-7 * expected.abs()).all(), (error / expected).max()
    # Half of that, and the little that tensor cores cut off.
    assert decibels(expected, found.double()) > 52
    assert torch.equal(found, *computed(columns, rows))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    "outputs",
    [(16, 16), (16, 1000), (144, 16, 112), (256, 128, 8), (2048, 1024, 1024), (1040, 4112)],
    ids=str,
)
def test_layers_together(outputs: tuple[int, ...], dtype: Any) -> None:
    """Layers start anywhere in tiles; the last one may have any number of outputs."""
    columns, rows = operands(sum(outputs), 528, 2064, dtype)
    found = computed(columns, rows, *outputs)
    assert torch.equal(torch.cat(found), *computed(columns, rows))


def test_sums_of_tensor_cores_alone_lose_more() -> None:
    columns, rows = operands(1024, 1024, 16384, E4M3)
    alone: Any = ("row", "row", True, None, None, "", BF16, None, None, None, False)
    forward = torch.ops.fused_norm.fp8_linear(*columns, *rows, *alone)
    expected = exact(columns, rows)
    lost = decibels(expected, forward.double())
    assert lost < 48
    assert decibels(expected, computed(columns, rows)[0].double()) > lost + 6


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(number: float) -> None:
    columns, rows = operands(272, 208, 2048, E5M2)
    (clean,) = computed(columns, rows)
    columns[0][7, 1000] = number
    (found,) = computed(columns, rows)
    others = torch.arange(272, device="cuda") != 7
    assert torch.equal(found[others], clean[others])
    assert not found[7].isfinite().any()


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_gradients_of_layers(scaling: str, count: int) -> None:
    # As many rows as lose the most, with a mean as that of what follows a bias.
    M, N, K = 16384, 256, 512
    torch.manual_seed(count)
    x = (torch.randn(M, K, device="cuda") + 1).to(BF16)
    dys = [(torch.randn(M, N, device="cuda") + 0.5).to(BF16) for _ in range(count)]
    weights = [torch.randn(N, K, device="cuda", dtype=BF16) for _ in range(count)]
    how = (scaling, scaling == "tensor", scaling, scaling, True, True)
    wanted = list(range(1, count + 1))
    found = layers_backward(x, None, None, "", dys, weights, [None] * count, *how, wanted, False)
    kind = E5M2 if scaling == "tensor" else E4M3
    rows = recipes.quantize(x.t().contiguous(), Cast(E4M3, scaling), True)
    for dy, dweight in zip(dys, found, strict=True):
        columns = recipes.quantize(dy.t().contiguous(), Cast(kind, scaling), True)
        assert decibels(exact(columns, rows), dweight.double()) > 52
