"""Hopper's kernels that quantize several matrices by one launch: each has the recipe's bits."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes
from kernel_harness import Guarded
from test_fp8_blocks import on_hopper, ran
from test_fp8_normed_hopper import assert_same, matrix
from torch import Tensor

from fused_norm import recipes
from fused_norm.call.record import MOST_MATRICES, Call, Matrix
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.recipes import E4M3, E5M2, Cast

pytestmark = on_hopper
BF16, F32 = torch.bfloat16, torch.float32
OPS = torch.ops.fused_norm
# Of one width and of several; ragged along each side; a tile, and two for a block; one matrix.
SETS = [
    [(16, 16)],
    [(2048, 1024), (1024, 1024), (1024, 1024)],
    [(3072, 1024), (3072, 1024)],
    [(16384, 2048), (1024, 2048)],
    [(512, 4096), (8192, 4096), (16, 4096), (520, 4096), (8, 4096)],
    [(1, 16), (130, 272), (257, 1032), (5, 4096), (2000, 976), (16, 8208), (640, 64), (48, 48)],
    [(1000 * i + 7, 16 * i) for i in range(1, MOST_MATRICES + 1)],
]
# Of each matrix, untransposed, transposed, or both.
RESULTS = [(True, True), (True, False), (False, True)]


class Several:
    """Matrices on the device, and guarded memory for what kernels write of them."""

    def __init__(self, xs: list[Tensor], cast: Cast, which: list[tuple[bool, bool]]) -> None:
        """Allocate results: of each matrix untransposed and transposed, if wanted."""
        self.xs, self.cast, self.which = xs, cast, which
        self.counts = [1 if cast.scaling == "tensor" else sum(x.shape) for x in xs]
        self.maxima = [Guarded((n + -n % 4,), torch.int32, "cuda") for n in self.counts]
        self.results: list[dict[str, Guarded]] = []
        for x, (plain, transposed) in zip(xs, which, strict=True):
            M, K = x.shape
            sizes: dict[str, Any] = {"z": (M, K), "z_scale": (M, 1)} if plain else {}
            if transposed:
                sizes |= {"zt": (K, M + -M % 16), "zt_scale": (K, 1)}
            own = {
                name: Guarded(size, F32 if "scale" in name else torch.uint8, "cuda")
                for name, size in sizes.items()
            }
            self.results.append(own)

    def run(self, power_of_two: bool) -> None:
        """Launch both kernels once, for all."""
        extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
        stream = torch.cuda.current_stream().cuda_stream
        module, context = kernels.launcher(extension, 0, stream, True)
        records = (Matrix * len(self.xs))()
        for record, x, maxima, own in zip(records, self.xs, self.maxima, self.results, strict=True):
            maxima.tensor.zero_()
            record.M, record.K = x.shape
            record.x, record.maxima = x.data_ptr(), maxima.tensor.data_ptr()
            record.pitch = record.M + -record.M % 16 if "zt" in own else 0
            for name, guarded in own.items():
                setattr(record, name, guarded.tensor.data_ptr())
        call = Call(context=context, power_of_two=power_of_two, part_count=len(self.xs))
        call.eight_bits = 5 if self.cast.dtype is E5M2 else 4
        call.one_scale = self.cast.scaling == "tensor"
        call.parts = ctypes.addressof(records)
        module.maxima(ctypes.addressof(call))
        module.quantize_by_maxima(ctypes.addressof(call))
        torch.cuda.synchronize()

    def check(self, power_of_two: bool) -> None:
        """Compare maxima, numbers and scales with those of the recipe, bit by bit."""
        for i, (x, own) in enumerate(zip(self.xs, self.results, strict=True)):
            M, sizes = len(x), x.abs()
            most = [sizes.amax(0), *[sizes.amax(1)] * self.which[i][0]]
            if self.cast.scaling == "tensor":
                most = [sizes.amax().reshape(1)]
            bits = torch.cat(most).view(torch.int16).to(torch.int32)
            kept = self.maxima[i].checked()
            # Any NaN is the largest.
            is_nan = torch.cat(most).isnan()
            assert torch.equal(kept[: len(bits)][~is_nan], bits[~is_nan])
            assert (kept[: len(bits)][is_nan] > 0x7F80).all()
            assert not kept[len(bits) :].any()
            found = {name: guarded.checked() for name, guarded in own.items()}
            for name, v in (("z", x), ("zt", x.t().contiguous())):
                if name not in found:
                    continue
                q, scale = recipes.quantize(v, self.cast, power_of_two)
                numbers = found[name][:, : v.shape[1]].contiguous().view(self.cast.dtype)
                assert_alike(numbers, found[f"{name}_scale"], q, scale.expand(len(v), 1))
            if "zt" in found:
                assert not found["zt"][:, M:].any()


def assert_alike(q: Tensor, scale: Tensor, expected_q: Tensor, expected_scale: Tensor) -> None:
    """Compare bits; where a scale is infinite, all that it multiplies is NaN."""
    finite = expected_scale.isfinite()
    assert torch.equal(scale.isfinite(), finite)
    assert torch.equal(scale[finite], expected_scale[finite])
    is_nan = (expected_q.float() * expected_scale).isnan()
    assert torch.equal((q.float() * scale).isnan(), is_nan)
    one, other = q.view(torch.uint8), expected_q.view(torch.uint8)
    assert torch.equal(one[~is_nan], other[~is_nan])


def which_of(count: int, first: int) -> list[tuple[bool, bool]]:
    return [RESULTS[(first + i) % len(RESULTS)] for i in range(count)]


@pytest.mark.parametrize("shapes", SETS, ids=str)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_bits(shapes: Any, scaling: str, dtype: Any, power_of_two: bool) -> None:
    for first in range(len(RESULTS)):
        xs = [matrix(*shape, seed=i) for i, shape in enumerate(shapes)]
        # Rows and a column of zeros, and a matrix of them.
        xs[0][-1] = 0
        xs[-1][:, -1] = 0
        if len(xs) > 2:
            xs[1].zero_()
        several = Several(xs, Cast(dtype, scaling), which_of(len(xs), first))
        several.run(power_of_two)
        several.check(power_of_two)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_matrix(scaling: str, number: float) -> None:
    for shapes in SETS[1:]:
        for place in range(len(shapes)):
            xs = [matrix(*shape, seed=i) for i, shape in enumerate(shapes)]
            xs[place][-1, 3] = number
            xs[place][0, -1] = number
            several = Several(xs, Cast(E4M3, scaling), [(True, True)] * len(xs))
            several.run(True)
            several.check(True)
            for i, own in enumerate(several.results):
                finite = [own[name].tensor.isfinite().all() for name in ("z_scale", "zt_scale")]
                assert all(finite) == (i != place)


def test_too_many() -> None:
    xs = [matrix(16, 16, seed=i) for i in range(MOST_MATRICES + 1)]
    several = Several(xs, Cast(E4M3, "row"), [(True, True)] * len(xs))
    with pytest.raises(Exception, match="too many"):
        several.run(True)


def layers(scaling: str, rows: Tensor, weights: list[Tensor]) -> list[Any]:
    """Return arguments of `fp8_layers` that keep all in 8 bits, transposed, for a backward."""
    none = [None] * len(weights)
    how = (scaling, scaling, True, BF16, False, "", False, True, True)
    return [rows, weights, none, none, *how]


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("count", [1, 3, MOST_MATRICES])
def test_an_op_launches_each_kernel_once(scaling: str, count: int) -> None:
    K = 1040
    weights = [matrix(16 * (5 + 7 * i), K, seed=i) for i in range(count)]
    given = layers(scaling, matrix(300, K, seed=9), weights)
    OPS.fp8_layers(*given)
    found, names = ran(lambda: OPS.fp8_layers(*given))
    launches = -(-(1 + count) // MOST_MATRICES)
    assert sum("maxima_maxima" in name for name in names) == launches, names
    assert sum("quantize_by_maxima" in name for name in names) == launches, names
    # Of the rows, then of each weight.
    matrices, cast = [given[0], *weights], Cast(E4M3, scaling)
    kept = found[count:]
    for x, q, scale in zip(matrices, kept[::2], kept[1::2], strict=True):
        expected, own = recipes.quantize(x.t().contiguous(), cast, True)
        assert_same(q[:, : len(x)].contiguous(), expected)
        assert_same(scale, own.expand(len(q), 1).contiguous())


@pytest.mark.usefixtures("back_to_back")
def test_graphs_and_matrices_written_just_before() -> None:
    """No kernel starts with what an earlier one has still to write."""
    weights = [matrix(n, 1024, seed=n) for n in (2048, 1024, 1024)]

    def run(x: Tensor) -> Tensor:
        found = OPS.fp8_layers(*layers("row", x, weights))
        return torch.cat([v.contiguous().view(torch.uint8).flatten() for v in found])

    assert_same_in_graphs_and_after_writes(run, matrix(4000, 1024))


def test_every_size() -> None:
    generator = torch.Generator().manual_seed(0)
    options = itertools.cycle(itertools.product(("row", "tensor"), (False, True)))
    for i, (scaling, power_of_two) in zip(range(60), options, strict=False):
        count = 1 + i % MOST_MATRICES
        sizes = torch.randint(1, 200, (count, 2), generator=generator).tolist()
        xs = [matrix(13 * M, 8 * K, seed=j) for j, (M, K) in enumerate(sizes)]
        several = Several(xs, Cast(E4M3, scaling), which_of(count, i))
        several.run(power_of_two)
        several.check(power_of_two)
