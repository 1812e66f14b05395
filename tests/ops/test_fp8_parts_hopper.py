"""Hopper's kernels that quantize a gradient from its parts: the bits of the concatenated one."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes
from kernel_harness import Guarded
from test_fp8_blocks import on_hopper, ran
from test_fp8_normed_hopper import matrix
from torch import Tensor

import fused_norm as fn
from fused_norm.call.record import MOST_MATRICES, Call, Matrix
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.ops.eight_bits import quantize
from fused_norm.ops.output_parts import norm_linear_in_parts
from fused_norm.recipes import E4M3, E5M2, Cast

pytestmark = on_hopper
BF16, F32 = torch.bfloat16, torch.float32
OPS = torch.ops.fused_norm
# Ragged along both sides of tiles, which have 64 columns; parts that are wider than those before.
SIZES: list[tuple[int, ...]] = [(16, 16), (2048, 1040), (16, 272, 1040), (2048, 1024, 1024)]
SIZES += [(1040, 16, 2048), (272,) * MOST_MATRICES]
ROWS = (1, 17, 1000, 16448)
CASTS = [Cast(dtype, scaling) for dtype in (E4M3, E5M2) for scaling in ("row", "tensor")]
RESULTS = [(True, True), (True, False), (False, True)]
Results = list[dict[str, Tensor]]


def quantized(
    wholes: Sequence[Sequence[Tensor]],
    cast: Cast,
    power_of_two: bool = True,
    which: tuple[bool, bool] = (True, True),
) -> Results:
    """Return maxima, numbers and scales of matrices, each given in parts, by one launch of each."""
    is_one, records, found = cast.scaling == "tensor", list[Matrix](), []
    for parts in wholes:
        M, N = len(parts[0]), sum(part.shape[1] for part in parts)
        count = 1 if is_one else N + M * which[0]
        own = {"maxima": Guarded((count + -count % 4,), torch.int32, "cuda")}
        own["maxima"].tensor.zero_()
        if which[0]:
            own |= {"z": Guarded((M, N), torch.uint8, "cuda")}
            own |= {"z_scale": Guarded((M,), F32, "cuda")}
        if which[1]:
            own |= {"zt": Guarded((N, M + -M % 16), torch.uint8, "cuda")}
            own |= {"zt_scale": Guarded((N,), F32, "cuda")}
        skipped = 0
        for part in parts:
            record = Matrix(M=M, K=part.shape[1], x=part.data_ptr(), pitch=(M + -M % 16) * which[1])
            for name, guarded in own.items():
                setattr(record, name, guarded.tensor.data_ptr())
            if len(parts) > 1:
                record.whole, record.skipped = N, skipped
            skipped += part.shape[1]
            records.append(record)
        found.append(own)
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    stream = torch.cuda.current_stream().cuda_stream
    module, context = kernels.launcher(extension, 0, stream, True)
    call = Call(context=context, power_of_two=power_of_two, part_count=len(records))
    call.eight_bits, call.one_scale = 5 if cast.dtype is E5M2 else 4, is_one
    all_of_them = (Matrix * len(records))(*records)
    call.parts = ctypes.addressof(all_of_them)
    module.maxima(ctypes.addressof(call))
    module.quantize_by_maxima(ctypes.addressof(call))
    torch.cuda.synchronize()
    return [{name: guarded.checked() for name, guarded in own.items()} for own in found]


def assert_same_bits(found: Results, expected: Results) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, v in one.items():
            assert torch.equal(v.view(torch.uint8), other[name].view(torch.uint8)), name


def gradients(M: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return parts of magnitudes of their own, with rows of zeros, in all parts and in some."""
    parts = [matrix(M, n, seed=i) * 2**i for i, n in enumerate(sizes)]
    # A single row has numbers.
    parts[0][max(M // 2, 1) :] = 0
    for part in parts:
        part[5:7] = 0
        part[:, -1] = 0
    return parts


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_bits(M: int, sizes: tuple[int, ...], cast: Cast) -> None:
    parts = gradients(M, sizes)
    whole = torch.cat(parts, 1)
    for which, power_of_two in itertools.product(RESULTS, (False, True)):
        how = (cast, power_of_two, which)
        assert_same_bits(quantized([parts], *how), quantized([[whole]], *how))


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number(number: float, cast: Cast) -> None:
    """It reaches its row of all parts, and its column; with one scale, all."""
    for sizes, place in itertools.product(SIZES[:-1], range(3)):
        if place >= len(sizes):
            continue
        parts = gradients(1000, sizes)
        parts[place][-1, 3] = number
        (found,) = quantized([parts], cast)
        assert_same_bits([found], quantized([[torch.cat(parts, 1)]], cast))
        of_rows = found["z_scale"].isfinite()
        is_one = cast.scaling == "tensor"
        assert of_rows[:-1].all() == (not is_one)
        assert not of_rows[-1]
        assert (~found["zt_scale"].isfinite()).sum() == (sum(sizes) if is_one else 1)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_among_others(scaling: str) -> None:
    """A matrix in parts stays its own where one launch takes more, of other sizes."""
    cast = Cast(E4M3, scaling)
    groups = [[matrix(520, 400, seed=7)], gradients(300, (272, 16)), [matrix(16, 4096, seed=8)]]
    groups += [gradients(1000, (16, 1040, 272)), [matrix(1, 16, seed=9)]]
    wholes = [[torch.cat(parts, 1)] for parts in groups]
    assert_same_bits(quantized(groups, cast), quantized(wholes, cast))
    each = [quantized([parts], cast)[0] for parts in wholes]
    assert_same_bits(quantized(groups, cast), each)


def backward(
    dys: Sequence[Tensor], z: Any, weight: Tensor, cast: Cast, wanted: Any
) -> list[Tensor]:
    how = (cast.scaling, cast.dtype is E5M2, cast.scaling, cast.scaling, True, True)
    given = (*z, None, "", [*dys], [weight], [None], *how, [*wanted], False)
    found: list[Tensor] = OPS.fp8_layers_backward(*given)
    return found


def operands(M: int, N: int, cast: Cast, K: int = 1024) -> tuple[Any, Tensor]:
    """Return rows in 8 bits, transposed, as a forward keeps them, and a weight."""
    q, scale = quantize(matrix(M, K), Cast(E4M3, cast.scaling), True, plain=False, transposed=True)
    return (q, scale.expand(K, 1).contiguous()), matrix(N, K, seed=1) / 32


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_gradients(M: int, sizes: tuple[int, ...], cast: Cast) -> None:
    parts = gradients(M, sizes)
    whole = torch.cat(parts, 1)
    given = operands(M, sum(sizes), cast)
    for wanted in ((0, 1, 2), (0,), (1,)):
        found, names = ran(lambda w=wanted: backward(parts, *given, cast, w))
        expected = backward([whole], *given, cast, wanted)
        for place, one, other in zip(wanted, found, expected, strict=True):
            if place < 2:
                assert torch.equal(one, other)
            else:
                exact, size = whole.double().sum(0), whole.double().abs().sum(0)
                assert ((one - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * size).all()
        assert not any("CatArray" in name or "direct_copy" in name for name in names), names
        # Gradients in e5m2 are quantized by other launches than the weight.
        most = 2 if cast.dtype is E5M2 or len(sizes) == MOST_MATRICES else 1
        for kernel in ("maxima_maxima", "quantize_by_maxima"):
            assert 1 <= sum(kernel in name for name in names) <= most, names


@pytest.mark.parametrize("layout", ["strided", "not aligned"])
def test_layouts(layout: str) -> None:
    cast, sizes = Cast(E4M3, "row"), (272, 16)
    whole = matrix(1000, sum(sizes))
    parts = list(whole.split(sizes, 1))
    if layout == "not aligned":
        parts = [torch.cat([p.flatten()[:1], p.flatten()])[1:].view(p.shape) for p in parts]
    given = operands(1000, sum(sizes), cast)
    found, expected = (backward(dys, *given, cast, (0, 1)) for dys in (parts, [whole]))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2)], ids=str)
def test_calls(recipe: str, used: tuple[int, ...]) -> None:
    sizes = (2048, 1024, 1024)
    x, w = matrix(4, 500, 1024), matrix(sum(sizes), 1024, seed=1) / 32
    gamma, results = matrix(1024, seed=2), []
    for v in (x, w, gamma):
        v.requires_grad_()
    options: Any = {"normalization": "rms_norm", "norm_weight": gamma, "recipe": recipe}
    for in_parts in (True, False):
        if in_parts:
            ys = norm_linear_in_parts(x, w, None, sizes, **options)
        else:
            ys = fn.norm_linear(x, w, **options).split(sizes, -1)
        dys = [matrix(*ys[i].shape, seed=10 + i) for i in used]
        found = torch.autograd.grad([ys[i] for i in used], (x, w, gamma), dys)
        results.append([*(y.detach() for y in ys), *found])
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("back_to_back")
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_graphs_and_gradients_written_just_before(scaling: str) -> None:
    """No kernel starts with what an earlier one has still to write."""
    cast, sizes = Cast(E4M3, scaling), (2048, 1024, 1024)
    given = operands(4000, sum(sizes), cast)

    def run(dy: Tensor) -> Tensor:
        parts = [part.contiguous() for part in dy.split(sizes, 1)]
        return torch.cat([v.flatten() for v in backward(parts, *given, cast, (0, 1, 2))])

    assert_same_in_graphs_and_after_writes(run, matrix(4000, sum(sizes)))
