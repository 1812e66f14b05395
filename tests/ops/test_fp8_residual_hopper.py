"""Hopper's FP8 products that add a residual to what they store, rounded once."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch
from fp8_products import decibels
from kernel_harness import Guarded
from test_fp8_blocks import on_hopper, ran
from torch import Tensor

import fused_norm as fn
from fused_norm import recipes
from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.ops import scaled
from fused_norm.ops.eight_bits import scales_of
from fused_norm.recipes import E4M3, E5M2, Cast

pytestmark = [*on_hopper, pytest.mark.usefixtures("no_grad")]
BF16 = torch.bfloat16
OPS = torch.ops.fused_norm
Size = tuple[int, int, int]
HOW = [("row", "row"), ("tensor", "tensor"), ("1x128", "128x128")]
"""Scales of rows and of weights."""
# For few rows; in tiles of each width, shared by consumers or in turn, ragged along each side.
SIZES: list[Size] = [(1, 144, 16), (5, 4096, 1040), (16, 272, 4112), (37, 144, 16), (64, 2048, 400)]
SIZES += [(37, 16, 16), (129, 16, 8208), (300, 272, 1040), (1001, 272, 8208), (3000, 16, 1040)]
SIZES += [(1001, 1040, 4112), (513, 2048, 4112), (2049, 1040, 1040), (8192, 1024, 1040)]


def exact(
    size: Size, how: tuple[str, str], device: str = "cuda", kind: torch.dtype = E4M3
) -> list[Tensor]:
    """Return rows of this type and a weight in e4m3, whose product is exact in float32.

    Tensor cores have some 14 bits for sums: of ones, those may have 4096 terms.
    """
    M, K, N = size
    torch.manual_seed(M + K + N)
    found = list[Tensor]()
    for shape, scaling in (((M, K), how[0]), ((N, K), how[1])):
        dtype = E4M3 if found else kind
        found.append(torch.randint(-1, 2, shape).float().to(dtype).to(device))
        scale = torch.randint(-2, 3, scales_of(shape, scaling)).float().exp2()
        found.append(scale.to(device))
    return found


def numbers(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return (torch.randn(*shape) * 8).to(BF16).cuda()


def by_us(
    given: list[Tensor], how: tuple[str, str], bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    y: Tensor = scaled.linear(*given, *how, True, bias, residual, "", BF16)
    return y


def reference(
    given: list[Tensor], how: tuple[str, str], bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Return the same by PyTorch's ops on a CPU, which have exact products."""
    cpu = [None if t is None else t.cpu() for t in (*given, bias, residual)]
    y: Tensor = OPS.fp8_linear_by_python(
        *cpu[:4], *how, True, *cpu[4:], "", BF16, None, None, None, False
    )
    return y


def shape_of(names: list[str]) -> str:
    """Return what tells the tiles of the only kernel of ours: their width, or the most rows."""
    (name,) = [name for name in names if "fused_norm" in name]
    assert "scaled_add" in name, name
    found = re.search(r"few_rows_\w+?_(16|64)_|128x(\d+)", name)
    assert found, name
    assert "ping_pong" not in name
    return f"few {found[1]}" if found[1] else found[2]


@pytest.mark.parametrize(
    ("how", "kind"), [*((how, E4M3) for how in HOW), *((how, E5M2) for how in HOW[:2])], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_bits(how: tuple[str, str], kind: torch.dtype, has_bias: bool) -> None:
    """Sums, scales and bias are exact here, so all bits are those of one rounding."""
    shapes = set[str]()
    for size in SIZES:
        given, (M, _, N) = exact(size, how, kind=kind), size
        bias, residual = numbers(N) if has_bias else None, numbers(M, N, seed=1)
        kept = residual.clone()
        found, names = ran(lambda g=given, b=bias, r=residual: by_us(g, how, b, r))
        shapes.add(shape_of(names))
        assert torch.equal(found.cpu(), reference(given, how, bias, residual)), size
        assert all(torch.equal(by_us(given, how, bias, residual), found) for _ in range(3))
        assert torch.equal(residual, kept)
    expected = {"128", "64"}
    if how[0] != "1x128":
        expected |= {"few 16", "few 64", "256"}
    assert shapes == expected


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_residual_alone(how: tuple[str, str]) -> None:
    """Added to zeros, each element is found where it was, no numbers among them."""
    for size in SIZES:
        M, _, N = size
        given = exact(size, how)
        given[0].view(torch.uint8).zero_()
        residual = numbers(M, N, seed=2)
        residual.view(-1)[:: M * N // 5 + 1] = torch.nan
        residual.view(-1)[1 :: M * N // 7 + 1] = torch.inf
        residual[-1, -1] = -torch.inf
        found = by_us(given, how, None, residual)
        assert torch.equal(found.isnan(), residual.isnan()), size
        assert torch.equal(found.nan_to_num(), residual.nan_to_num()), size


@pytest.mark.parametrize("how", HOW, ids=str)
def test_every_size(how: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(0)
    for i in range(20):
        M, K, N = (int(torch.randint(1, top, (), generator=generator)) for top in (1500, 100, 150))
        # Every other time for few rows.
        size = (M if i % 2 else M % 64 + 1, 16 * K, 16 * N)
        given, residual = exact(size, how), numbers(size[0], size[2], seed=i)
        bias = numbers(size[2], seed=i + 1) if i % 3 else None
        found = by_us(given, how, bias, residual)
        assert torch.equal(found.cpu(), reference(given, how, bias, residual)), size


def test_nothing_is_written_beyond_the_result() -> None:
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    stream = torch.cuda.current_stream().cuda_stream
    module, context = kernels.launcher(extension, 0, stream, True)
    for how in HOW:
        for M, K, N in [
            (130, 272, 144),
            (1, 144, 16),
            (63, 144, 80),
            (257, 16, 400),
            (4100, 64, 976),
        ]:
            given = exact((M, K, N), how)
            # The kernels have a scale for each row.
            if how[0] == "tensor":
                given[1], given[3] = (
                    s.expand(n, 1).contiguous() for s, n in zip(given[1::2], (M, N), strict=True)
                )
            residual = Guarded.of(numbers(M, N, seed=3))
            y = Guarded((M, N), BF16, "cuda")
            call = Call(M=M, N=N, K=K, context=context, eight_bits=4, pitch=N)
            call.block_scales = int(how[0] == "1x128")
            call.z, call.z_scale, call.weight, call.weight_scale = (t.data_ptr() for t in given)
            call.residual, call.y = residual.tensor.data_ptr(), y.tensor.data_ptr()
            module.linear(ctypes.addressof(call))
            its_how = how if how[0] != "tensor" else ("row", "row")
            expected = reference(given, its_how, None, residual.checked())
            assert torch.equal(y.checked().cpu(), expected), (M, K, N)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_layouts(how: tuple[str, str]) -> None:
    """Residuals that no kernel can read as they are."""
    size = (300, 272, 400)
    M, _, N = size
    given, whole = exact(size, how), numbers(2 * M, 2 * N, seed=4)
    residuals = [whole[::2, :N], whole[:M, 8 : N + 8], whole[:M, 1 : N + 1], whole[:N, :M].t()]
    residuals += [whole.flatten()[1 : 1 + M * N].view(M, N), whole[:1, :N].expand(M, -1)]
    for residual in residuals:
        found = by_us(given, how, None, residual)
        assert torch.equal(found.cpu(), reference(given, how, None, residual))


@pytest.mark.parametrize("how", HOW, ids=str)
def test_precision(how: tuple[str, str]) -> None:
    """One rounding is closer than two, at any size of the residual."""
    for M, K, N in ((16, 4096, 1040), (1001, 2048, 4112), (2049, 4096, 1040)):
        x, w = numbers(M, K, seed=5), numbers(N, K, seed=6) / 64
        rows = recipes.quantize(x, Cast(E4M3, how[0]), True)
        by = recipes.quantize(w, Cast(E4M3, how[1]), True)
        product = recipes.product(rows, how[0], by, how[1], torch.float64)
        for factor in (0.1, 10.0):
            residual = numbers(M, N, seed=7) * factor
            truth = product + residual.double()
            given = [*rows, *by]
            found, once = by_us(given, how, None, residual), by_us(given, how, None, None)
            assert decibels(found, truth) > 50, (M, factor)
            assert decibels(found, truth) > decibels(once + residual, truth), (M, factor)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(
    "size",
    [(16, 4096, 8208), (64, 4096, 4096), (8192, 144, 1040), (16, 16384, 1040), (64, 16384, 1040)],
    ids=str,
)
@pytest.mark.usefixtures("back_to_back")
def test_a_residual_of_the_kernel_before(size: Size, how: tuple[str, str]) -> None:
    """No kernel reads a residual that the one before has still to write.

    Rows and weight have been there for long, so only the residual is late. A kernel that ends in a
    wave of few blocks leaves room for the next one to start, and so does one of few, long blocks;
    every other one has short sums, which end before those of the kernel before.
    """
    M, _, N = size
    two = exact(size, how), exact((M, 144, N), how)
    first = numbers(M, N, seed=8)
    expected = [first]
    for i in range(4):
        expected.append(by_us(two[i % 2], how, None, expected[-1]))
        torch.cuda.synchronize()

    def four() -> list[Tensor]:
        ys = [first]
        for i in range(4):
            ys.append(by_us(two[i % 2], how, None, ys[-1]))
        return ys

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            # The next results take this memory, so that none of an earlier call is there.
            unused = [torch.full_like(first, torch.nan) for _ in range(4)]
            del unused
            assert torch.equal(four()[-1], expected[-1])
        # Kernels of a graph follow each other without a pause for the host.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            ys = four()
        for _ in range(20):
            for y in ys[1:]:
                y.fill_(torch.nan)
            graph.replay()
            assert all(map(torch.equal, ys, expected))
    stream.synchronize()


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("M", [16, 64, 2049])
@pytest.mark.usefixtures("back_to_back")
def test_graphs_and_residuals_written_just_before(M: int, how: tuple[str, str]) -> None:
    size = (M, 1040, 1040)
    given, residual = exact(size, how), numbers(M, 1040, seed=9)
    expected = by_us(given, how, None, residual)
    late = torch.zeros_like(residual)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        by_us(given, how, None, late)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = by_us(given, how, None, late)
        for _ in range(20):
            late.fill_(torch.nan)
            torch.cuda._sleep(100_000)
            late.copy_(residual)
            graph.replay()
            assert torch.equal(y, expected)
            late.fill_(torch.nan)
            late.copy_(residual)
            found = by_us(given, how, None, late)
            late.fill_(torch.nan)
            assert torch.equal(found, expected)
        stream.synchronize()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp(recipe: str, activation: str) -> None:
    """The last layer of an MLP adds what comes after it, with no pass more than without."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": activation, "recipe": recipe, "dtype": BF16}
    mlp = fn.LayerNormMLP(1024, 2048, device="cuda", **options).eval().requires_grad_(False)
    fn.freeze(mlp)
    for rows in (16, 64, 129, 2048):
        x, residual = numbers(rows, 1024), numbers(rows, 1024, seed=1)
        for more in ({}, {"residual_out": residual}):
            mlp(x, **more)
        y, without = ran(lambda x=x: mlp(x))
        found, names = ran(lambda x=x, r=residual: mlp(x, residual_out=r))
        assert any("scaled_add" in name for name in names), names
        assert len(names) == len(without), (names, without)
        wide = y.double() + residual.double()
        # Of y, that is once more rounded.
        assert decibels(found, wide) > 45
