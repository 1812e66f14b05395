"""Hopper's kernels for a norm whose rows are written in 8 bits alone, in both layouts."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes
from fp8_products import decibels
from kernel_harness import Guarded
from test_fp8_blocks import on_hopper, ran
from torch import Tensor

import fused_norm as fn
from fused_norm import recipes
from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.norms import NORMALIZATIONS, NORMS
from fused_norm.ops import fp8, normed_linears
from fused_norm.ops.scaled_norm_rows import LONGEST
from fused_norm.recipes import E4M3, Cast

pytestmark = on_hopper
BF16, F32 = torch.bfloat16, torch.float32
OPS = torch.ops.fused_norm
EPS = 1e-5
NORMS_OF_EACH = pytest.mark.parametrize("normalization", NORMALIZATIONS)
# Rows of a warp, of several, of a whole block; ragged along each side; fewer than SMs, and many.
SHAPES = [(1, 16), (5, 1024), (17, 1040), (40, 64), (129, 2064), (131, 4096), (1000, 1096)]
SHAPES += [(77, LONGEST), (300, 5120), (2049, 768), (4100, 1024), (8191, 4096), (20000, 272)]
AFFINE = [("", 0.0), ("gamma", 0.0), ("beta", 0.0), ("gamma beta", 0.0), ("gamma beta", 0.5)]


def matrix(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers of sizes that differ from column to column."""
    torch.manual_seed(seed + sum(shape))
    found = torch.randn(*shape, device="cuda") * torch.randn(shape[-1], device="cuda").exp()
    return found.to(BF16)


def parameters(affine: str, k: int) -> list[Tensor | None]:
    return [
        matrix(k, seed=seed) if name in affine else None
        for seed, name in enumerate(("gamma", "beta"), 3)
    ]


def rounded(x: Tensor, affine: list[Any], offset: float, rstd: Tensor, mean: Any) -> Tensor:
    """Return the norm of x with given statistics: float32's factors, one rounding with beta."""
    gamma, beta = affine
    z = (x.float() if mean is None else x.float() - mean) * rstd
    if gamma is not None:
        # In float64, a product of numbers in float32 is exact.
        z = z.double() * (gamma.float() + offset).double()
    if beta is not None:
        z = z.double() + beta.double()
    return z.float().to(BF16)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compare bits, except those of what is no number."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    a, b = found.float(), expected.float()
    assert torch.equal(a.isnan(), b.isnan())
    kind = torch.uint8 if found.dtype is E4M3 else torch.int32
    numbers = ~a.isnan()
    assert torch.equal(found.view(kind)[numbers], expected.view(kind)[numbers])


def assert_bits(
    found: list[Tensor], x: Tensor, affine: list[Any], offset: float, how: tuple[str, bool]
) -> None:
    """Compare rows and scales with the recipe's of the norm with the statistics that were found."""
    (scaling, power_of_two), (M, K) = how, x.shape
    q, scale, qt, qt_scale, rstd, *means = found
    z = rounded(x, affine, offset, rstd, means[0] if means else None)
    cast = Cast(E4M3, scaling)
    for (a, s), v in (((q, scale), z), ((qt[:, :M], qt_scale), z.t().contiguous())):
        expected, of_it = recipes.quantize(v, cast, power_of_two)
        assert_same(a.contiguous(), expected)
        assert_same(s, of_it.expand(len(v), 1).contiguous())
    assert qt.shape == (K, M + -M % 16)
    assert not qt[:, M:].view(torch.uint8).any()


def assert_statistics(found: list[Tensor], x: Tensor, normalization: str) -> None:
    mean, rstd = NORMS[normalization].statistics(x.double(), EPS)
    finite = rstd.isfinite()
    error = (found[4].squeeze(-1).double() / rstd - 1)[finite].abs()
    assert not len(error) or error.max() < 1e-5
    assert torch.equal(found[4].squeeze(-1).isfinite(), finite)
    if mean is not None:
        error = ((found[5].squeeze(-1).double() - mean) * rstd)[finite].abs()
        assert not len(error) or error.max() < 1e-5


@NORMS_OF_EACH
@pytest.mark.parametrize(("affine", "offset"), AFFINE)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_bits(
    normalization: str, affine: str, offset: float, scaling: str, power_of_two: bool
) -> None:
    how = (scaling, power_of_two)
    for shape in SHAPES:
        x, own = matrix(*shape), parameters(affine, shape[-1])
        x[-1] = 0
        given = (x, *own, normalization, EPS, offset, *how)
        found, names = ran(lambda given=given: OPS.fp8_norm_rows(*given))
        ours = [name for name in names if "maxima" in name]
        assert len(ours) == 2, names
        assert "norm_maxima" in ours[0]
        assert "quantize_by_maxima" in ours[1]
        assert_statistics(found, x, normalization)
        assert_bits(found, x, own, offset, how)
        for one, other in zip(found, OPS.fp8_norm_rows(*given), strict=True):
            assert_same(one, other)
        # PyTorch's statistics differ by a rounding or so, which few of the rows' numbers show.
        theirs = OPS.fp8_norm_rows_by_python(*given)
        differ = found[0].view(torch.uint8) != theirs[0].view(torch.uint8)
        assert differ.float().mean() < 0.01


@NORMS_OF_EACH
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen(normalization: str, scaling: str, number: float) -> None:
    for shape in ((300, 208), (129, 4096), (40, LONGEST)):
        x, own = matrix(*shape), parameters("gamma beta", shape[-1])
        clean = OPS.fp8_norm_rows(x, *own, normalization, EPS, 0.0, scaling, True)
        x[3, 5], x[17, 0] = number, number
        found = OPS.fp8_norm_rows(x, *own, normalization, EPS, 0.0, scaling, True)
        assert_bits(found, x, own, 0.0, (scaling, True))
        wide = recipes.dequantize(found[0], found[1], "row", F32)
        assert wide[[3, 17]].isnan().any(1).all()
        if scaling == "row":
            others = torch.ones(shape[0], dtype=torch.bool, device="cuda")
            others[[3, 17]] = False
            for one, other in zip(found[:2], clean[:2], strict=True):
                assert_same(one[others].contiguous(), other[others].contiguous())
        # No column, which has a number of each row, passes for one of numbers.
        assert not recipes.dequantize(found[2], found[3], "row", F32)[5].isfinite().all()


@NORMS_OF_EACH
def test_constant_rows(normalization: str) -> None:
    for K, number in itertools.product((48, 3072, 5120), (0.0, 1.0, -1000.0, 3e4)):
        x = torch.full((33, K), number, device="cuda", dtype=BF16)
        own = parameters("gamma beta", K)
        found = OPS.fp8_norm_rows(x, *own, normalization, EPS, 0.0, "row", True)
        assert_bits(found, x, own, 0.0, ("row", True))
        if normalization == "layer_norm":
            z = rounded(x, own, 0.0, found[4], found[5])
            assert own[1] is not None
            assert torch.equal(z, own[1].expand_as(z))


def test_every_size() -> None:
    generator = torch.Generator().manual_seed(0)
    for i in range(60):
        M, K = (int(torch.randint(1, top, (), generator=generator)) for top in (3000, 400))
        x, own = matrix(M, 16 * K), parameters(AFFINE[i % len(AFFINE)][0], 16 * K)
        how = (("row", "tensor")[i % 2], i % 3 == 0)
        found = OPS.fp8_norm_rows(x, *own, NORMALIZATIONS[i // 2 % 2], EPS, 0.25, *how)
        assert_bits(found, x, own, 0.25, how)


def test_layouts_that_kernels_read_a_copy_of() -> None:
    whole, own = matrix(100, 1100), parameters("gamma beta", 1040)
    unaligned = whole.flatten()[1 : 1 + 50 * 1040].view(50, 1040)
    for x in (whole[:, 3:1043], whole[::2, :1040], unaligned):
        found = OPS.fp8_norm_rows(x, *own, "rms_norm", EPS, 0.0, "row", True)
        assert_bits(found, x, own, 0.0, ("row", True))


@NORMS_OF_EACH
@pytest.mark.parametrize("one_scale", [0, 1])
def test_nothing_is_written_beyond_the_results(normalization: str, one_scale: int) -> None:
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    stream = torch.cuda.current_stream().cuda_stream
    module, context = kernels.launcher(extension, 0, stream, True)
    for M, K in ((1, 16), (130, 272), (257, 1032), (5, 4096), (2000, 976)):
        x, own = matrix(M, K), parameters("gamma beta", K)
        pitch, count = M + -M % 16, 1 if one_scale else K + M
        sizes = [(M, K), (K, pitch), (M, 1), (K, 1), (M, 1), (M, 1), (count,)]
        dtypes = [torch.uint8] * 2 + [F32] * 4 + [torch.int32]
        guarded = [Guarded(s, d, "cuda") for s, d in zip(sizes, dtypes, strict=True)]
        z, zt, scale, zt_scale, rstd, mean, maxima = guarded
        maxima.tensor.zero_()
        call = Call(M=M, K=K, context=context, eight_bits=4, one_scale=one_scale, pitch=pitch)
        call.normalization, call.eps = NORMS[normalization].number, EPS
        call.x, call.gamma, call.beta = (t.data_ptr() for t in (x, *own) if t is not None)
        call.z, call.zt, call.z_scale, call.zt_scale, call.rstd, mean_at, call.workspace = (
            v.tensor.data_ptr() for v in guarded
        )
        has_mean = NORMS[normalization].has_mean
        call.mean = mean_at if has_mean else 0
        module.maxima(ctypes.addressof(call))
        module.quantize_by_maxima(ctypes.addressof(call))
        torch.cuda.synchronize()
        found = [v.checked() for v in (z, scale, zt, zt_scale, rstd, *[mean] * has_mean)]
        found[0], found[2] = found[0].view(E4M3), found[2].view(E4M3)
        maxima.checked()
        assert_bits(found, x, own, 0.0, ("tensor" if one_scale else "row", False))


def step(
    normalization: str, recipe: str, rows: int, compiled: str = ""
) -> tuple[list[Tensor], list[str]]:
    """Return results and gradients of an MLP with a residual, and the kernels that ran."""
    K, N = 1024, 2048
    x, r = (matrix(rows, K, seed=s).requires_grad_() for s in (0, 1))
    w, up = ((matrix(N, K, seed=s) / K**0.5).requires_grad_() for s in (2, 3))
    down = (matrix(K, N, seed=4) / N**0.5).requires_grad_()
    gamma, beta = (v.requires_grad_() for v in parameters("gamma beta", K) if v is not None)
    own = {"norm_weight": gamma} | ({"norm_bias": beta} if normalization == "layer_norm" else {})
    inputs = [x, r, w, up, down, *own.values()]

    def mlp() -> list[Tensor]:
        options: Any = {"normalization": normalization, "recipe": recipe, "eps": EPS, **own}
        options |= {"residual": r, "return_sum": True, "activation": "swiglu"}
        return [*fn.norm_mlp(x, (w, up), None, down, None, **options)]

    function: Any = mlp
    if compiled:
        torch.compiler.reset()
        function = torch.compile(mlp, backend=compiled, fullgraph=True)

    def gradients() -> list[Tensor]:
        ys = function()
        dys = [matrix(*y.shape, seed=9) for y in ys]
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, inputs, dys)]

    gradients()
    return ran(gradients)


# PyTorch's own, of 2.11.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@NORMS_OF_EACH
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("compiled", ["", "aot_eager", "inductor", "fused_norm"])
def test_a_step(
    normalization: str, recipe: str, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are as near to those of rows in bfloat16 as these are to each other."""
    # With both layers as one function, the gradient between them is rounded once less.
    monkeypatch.setattr(fp8, "is_mlp", lambda *_: False)
    for rows in (1000, 4096):
        found, names = step(normalization, recipe, rows, compiled)
        assert sum("norm_maxima" in name for name in names) == 1, names
        with monkeypatch.context() as patch:
            patch.setattr(normed_linears, "serves", lambda *_: False)
            # Not compiled: Inductor would normalize the sum before it is rounded to bfloat16, and
            # many numbers of such rows are others in 8 bits.
            expected, names = step(normalization, recipe, rows)
            assert not any("norm_maxima" in name for name in names)
        # y and the sum, then gradients: few numbers in 8 bits differ, by a rounding.
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert decibels(one, other) > 40


@NORMS_OF_EACH
@pytest.mark.parametrize(("affine", "offset"), AFFINE)
def test_gradients_of_the_norm(
    normalization: str, affine: str, offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    K = 1040
    x, w = matrix(3, 171, K).requires_grad_(), (matrix(1024, K, seed=2) / K**0.5).requires_grad_()
    gamma, beta = parameters(affine, K)
    inputs = [v.requires_grad_() for v in (x, w, gamma, beta) if v is not None]

    def gradients() -> list[Tensor]:
        options: Any = {"normalization": normalization, "recipe": "rowwise", "eps": EPS}
        options |= {"norm_weight": gamma, "norm_bias": beta, "weight_offset": offset}
        y = fn.norm_linear(x, w, **options)
        return [y, *torch.autograd.grad(y, inputs, matrix(*y.shape, seed=9))]

    found = gradients()
    assert found[0].grad_fn is not None
    assert found[0].grad_fn.name() == "NormedLinearsBackward"
    monkeypatch.setattr(normed_linears, "serves", lambda *_: False)
    for one, other in zip(found, gradients(), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert decibels(one, other) > 40


@pytest.mark.usefixtures("back_to_back")
@NORMS_OF_EACH
def test_graphs_and_rows_written_just_before(normalization: str) -> None:
    """No kernel starts with what an earlier one has still to write."""
    own = parameters("gamma beta", 1024)

    def run(x: Tensor) -> Tensor:
        found = OPS.fp8_norm_rows(x, *own, normalization, EPS, 0.0, "row", True)
        return torch.cat([v.contiguous().view(torch.uint8).flatten() for v in found])

    assert_same_in_graphs_and_after_writes(run, matrix(4000, 1024))
