"""Hopper's norm of rows that stores them in 8 bits, with a scale for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes
from test_fp8_blocks import on_hopper
from test_fp8_normed_hopper import matrix
from torch import Tensor

from fused_norm import recipes
from fused_norm.recipes import E4M3, Cast

pytestmark = on_hopper
BF16, EPS = torch.bfloat16, 1e-5
OPS = torch.ops.fused_norm
# Few rows; those of a warp and of a block, fewer and more than run at once; the last ones are of
# neither.
SHAPES = [
    (1, 8),
    (7, 16),
    (64, 1024),
    (65, 1024),
    (333, 144),
    (9001, 648),
    (4999, 1024),
    (2100, 1160),
    (300, 2560),
]
SHAPES += [(2000, 4096), (700, 7168), (64, 14336), (20, 16384)]
FORMS = [(n, o, r) for n in ("layer_norm", "rms_norm") for o in (0.0, 1.0) for r in (False, True)]


def expected_of(
    x: Tensor, residual: Tensor | None, own: Any, normalization: str, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the sum, rounded once, and its norm in float64."""
    total = x if residual is None else (x.float() + residual.float()).to(BF16)
    v, (gamma, beta) = total.double(), own
    if normalization == "layer_norm":
        v = v - v.mean(-1, keepdim=True)
    v = v * (v.square().mean(-1, keepdim=True) + EPS).rsqrt()
    if gamma is not None:
        v = v * (gamma.double() + offset)
    return total, v if beta is None else v + beta.double()


def assert_near(found: list[Tensor], z: Tensor, power_of_two: bool, few: float) -> None:
    """Compare scales, and numbers: few are next ones, where a rounding decides."""
    _, q, scale = found
    _, own = recipes.quantize(z.float(), Cast(E4M3, "row"), power_of_two)
    is_near = (scale / own - 1).abs() <= 2e-6
    # A power of two is the next one where the largest number is at its edge.
    assert is_near.float().mean() > (0.99 if power_of_two else 0.9999)
    again = (z.float() / scale).clamp(-448, 448).to(E4M3)
    gap = (again.float() - q.float()).abs()
    assert (gap > 0).sum() <= 3 + few * gap.numel()
    assert (gap <= 2**-3 * again.float().abs() + 2**-9).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_values(shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool) -> None:
    M, K = shape
    for i, (normalization, offset, has_residual) in enumerate(FORMS):
        x, r = matrix(M, K, seed=1) * 3, matrix(M, K, seed=2)
        x[0] = 0
        x[-1, K // 2] = 1000
        gamma, beta = (matrix(K, seed=s).to(dtype) for s in (3, 4))
        own = [(gamma, beta), (gamma, None), (None, beta), (None, None)][i % 4]
        residual = r if has_residual else None
        how = (normalization, EPS, offset, "row", power_of_two)
        found = OPS.fp8_norm(x, residual, *own, *how)
        total, z = expected_of(x, residual, own, normalization, offset)
        # Without a mean and a gamma, a number has to the largest one the ratio of two numbers of
        # bfloat16: some are just between two of 8 bits.
        is_ratio = normalization == "rms_norm" and not power_of_two
        assert_near(found, z, power_of_two, 2e-3 if is_ratio else 2e-5)
        if has_residual:
            assert torch.equal(found[0], total)
        for one, other in zip(found, OPS.fp8_norm(x, residual, *own, *how), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_rows_do_not_depend_on_each_other() -> None:
    M, K = 6000, 1024
    x, gamma = matrix(M, K), matrix(K, seed=1)
    how = (None, gamma, None, "layer_norm", EPS, 0.0, "row", False)
    _, q, scale = OPS.fp8_norm(x, *how)
    for start, count in ((0, 1), (4000, 1000), (5999, 1)):
        _, own, its_scale = OPS.fp8_norm(x[start : start + count].clone(), *how)
        assert torch.equal(own.view(torch.uint8), q[start : start + count].view(torch.uint8))
        assert torch.equal(its_scale, scale[start : start + count])
    for number in (float("nan"), float("inf")):
        x[4567, 100] = number
        _, other, its_scale = OPS.fp8_norm(x, *how)
        rest = torch.arange(M, device="cuda") != 4567
        assert torch.equal(other[rest].view(torch.uint8), q[rest].view(torch.uint8))
        assert torch.equal(its_scale[rest], scale[rest])
        assert (other[4567].float() * its_scale[4567]).isnan().all()


def test_rows_anywhere_in_memory() -> None:
    whole = matrix(400, 1100)
    flat = whole.flatten()
    for K in (1024, 1040):
        for x in (whole[:, 3 : 3 + K], flat[1 : 1 + 300 * K].view(300, K), whole[::2, :K]):
            for r in (None, flat[5 : 5 + x.numel()].view(x.shape)):
                found = OPS.fp8_norm(x, r, None, None, "rms_norm", EPS, 0.0, "row", False)
                dense = None if r is None else r.clone()
                again = (x.contiguous(), dense, None, None, "rms_norm", EPS, 0.0, "row", False)
                for one, other in zip(found, OPS.fp8_norm(*again), strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.usefixtures("back_to_back")
def test_graphs_and_rows_written_just_before() -> None:
    """No row is copied before an earlier kernel has written it."""
    gamma = matrix(1024, seed=1)

    def run(x: Tensor) -> Tensor:
        how = (None, gamma, None, "layer_norm", EPS, 0.0, "row", False)
        _, q, scale = OPS.fp8_norm(x, *how)
        return torch.cat([q.view(torch.uint8).flatten(), scale.view(torch.uint8).flatten()])

    assert_same_in_graphs_and_after_writes(run, matrix(9000, 1024))
