"""FP8 with scales of blocks on Hopper: kernels against the recipes, which say what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_graphs import replayed
from devices import ON_HOPPER
from fp8_products import LEAST, decibels, gradients
from kernel_harness import Guarded
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fused_norm as fn
from fused_norm import recipes
from fused_norm.chain import kernels
from fused_norm.ops import eight_bits, fp8, scaled
from fused_norm.recipes import E4M3, E5M2, Cast

BF16 = torch.bfloat16
VECTORS, SQUARES = "1x128", "128x128"
HOW = (VECTORS, SQUARES)
on_hopper = [
    pytest.mark.gpu,
    ON_HOPPER,
]
# Whole blocks, ragged ones, one row, one load of 16 elements, and more blocks than SMs.
SHAPES = [(256, 256), (1000, 1104), (513, 80), (1, 4096), (16, 16), (3000, 16), (129, 2064)]


def matrix(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def uneven(M: int, K: int) -> Tensor:
    """Return numbers whose sizes differ from row to row and from column to column."""
    torch.manual_seed(M + K)
    rows, columns = (torch.randn(n, device="cuda").exp() ** 2 for n in (M, K))
    return (torch.randn(M, K, device="cuda") * rows[:, None] * columns).to(BF16)


def ran(call: Any) -> tuple[Any, list[str]]:
    """Return what a call gives, and the name of each kernel that ran, once for each time."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        found = call()
        torch.cuda.synchronize()
    on_gpu = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return found, [event.name for event in on_gpu if "Activity Buffer" not in event.name]


def assert_same(found: list[Tensor], truth: list[Tensor]) -> None:
    for one, other in zip(found, truth, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        a, b = one.float(), other.float()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def in_blocks(v: Tensor, scaling: str, rounds: bool) -> list[Tensor]:
    """Return a matrix quantized by PyTorch's ops, untransposed and transposed."""
    transposed = F.pad(v, (0, 0, 0, -v.shape[0] % 16)).t()
    cast = Cast(E4M3, scaling)
    return [*recipes.quantize(v, cast, rounds), *recipes.quantize(transposed, cast, rounds)]


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("rounds", [False, True])
    def test_quantized_matrices_have_the_bits_of_the_recipes(self, rounds: bool) -> None:
        for shape in SHAPES:
            v = uneven(*shape)
            v[0, -1] = 0
            v[-1, :16] = 0
            views = [v, torch.cat([v, v], 1)[:, 1 : 1 + shape[1]]]
            for view in views:
                for dtype in (E4M3, E5M2):
                    cast = Cast(dtype, VECTORS)
                    expected = [*recipes.quantize(view.contiguous(), cast, rounds)]
                    found, names = ran(lambda v=view, c=cast: eight_bits.quantize(v, c, rounds))
                    assert_same(found, expected)
                    assert any("quantize_blocks_vec" in name for name in names), names
                expected = in_blocks(view.contiguous(), SQUARES, rounds)
                cast = Cast(E4M3, SQUARES)
                found = eight_bits.quantize(view, cast, rounds, transposed=True)
                assert_same(found, expected)
                assert_same(eight_bits.quantize(view, cast, rounds), expected[:2])
                only = eight_bits.quantize(view, cast, rounds, plain=False, transposed=True)
                assert_same(only, expected[2:])

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_no_number_is_seen_in_its_block(self, number: float) -> None:
        v = uneven(300, 400)
        v[123, 145] = number
        q, scale = eight_bits.quantize(v, Cast(E4M3, VECTORS), False)
        whole = recipes.dequantize(q, scale, VECTORS, torch.float32)
        assert whole[123, 128:256].isnan().all()
        assert whole.isnan().sum() == 128
        made = eight_bits.quantize(v, Cast(E4M3, SQUARES), False, transposed=True)
        whole = recipes.dequantize(*made[:2], SQUARES, torch.float32)
        back = recipes.dequantize(*made[2:], SQUARES, torch.float32)[:, :300].t()
        for each in (whole, back):
            assert each[:128, 128:256].isnan().all()
            assert each.isnan().sum() == 128 * 128

    @pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
    @pytest.mark.parametrize("rounds", [False, True])
    def test_norms(self, normalization: str, rounds: bool) -> None:
        """A warp a row, a block a row, and longer ones; each length once with a residual."""
        for M, K in [(40, 272), (333, 144), (8192, 4096), (7, 16), (64, 14336), (20, 16384)]:
            x, gamma, beta = matrix(M, K, scale=3.0), matrix(K), matrix(K)
            x[0] = 0
            for residual in (None, matrix(M, K)):
                how = (normalization, 1e-5, 0.0, VECTORS, rounds)
                found, names = ran(
                    lambda x=x, r=residual, g=gamma, b=beta, how=how: scaled.norm(x, r, g, b, *how)
                )
                total, q, scale = found
                exact = x if residual is None else x + residual
                if residual is not None:
                    assert torch.equal(total, exact)
                in_one_pass = (16384 if residual is None else 8192) >= K
                assert any("row_kernel" in name for name in names) == in_one_pass, names
                wide = exact.double()
                if normalization == "layer_norm":
                    z = F.layer_norm(wide, (K,), gamma.double(), beta.double(), 1e-5)
                else:
                    z = F.rms_norm(wide, (K,), gamma.double(), 1e-5) + beta.double()
                want = recipes.quantize(z.float(), Cast(E4M3, VECTORS), rounds)
                assert (scale.shape, q.shape) == (want[1].shape, want[0].shape)
                stands_for = recipes.dequantize(q, scale, VECTORS, torch.float64)
                its = recipes.dequantize(*want, VECTORS, torch.float64)
                # Few numbers lie so near the middle of two that roundings before decide.
                assert decibels(stands_for, its) > (60 if in_one_pass else 35)
                assert decibels(stands_for, z) > decibels(its, z) - 0.1

    def test_products(self) -> None:
        """Of tiles and blocks that are whole and that are not; the same bits each time."""
        sizes = [(1, 16, 16), (200, 208, 336), (17, 144, 48), (777, 1040, 1008), (64, 4096, 6144)]
        sizes += [(33, 1024, 3072), (1000, 16384, 512), (4096, 4096, 4096), (300, 272, 4096)]
        sizes += [(8192, 128, 2304), (128, 128, 128), (129, 129 * 16, 131 * 16)]
        for M, K, N in sizes:
            a = recipes.quantize(uneven(M, K), Cast(E4M3, VECTORS), False)
            b = recipes.quantize(uneven(N, K), Cast(E4M3, SQUARES), False)
            bias = matrix(N, scale=10.0)
            wide = (
                recipes.dequantize(*a, VECTORS, torch.float64),
                recipes.dequantize(*b, SQUARES, torch.float64),
            )
            exact = wide[0] @ wide[1].t()
            for added in (None, bias):
                call = lambda a=a, b=b, added=added: scaled.linear(  # noqa: E731
                    *a, *b, *HOW, False, added, None, "", BF16
                )
                y, names = ran(call)
                assert any("block_scaled" in name for name in names), names
                truth = exact if added is None else exact + added.double()
                # Row by row: the sizes of rows differ, and so would what is wrong in one of them.
                assert decibels(y, truth) > 50, (M, K, N)
                each = ((y.double() - truth).norm(dim=1) / truth.norm(dim=1)).max()
                assert each < 0.01, (M, K, N, each)
                assert all(torch.equal(y, call()) for _ in range(3))

    def test_nothing_is_written_beyond_the_result(self) -> None:
        import ctypes

        from fused_norm.call.record import Call
        from fused_norm.native import build

        extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
        stream = torch.cuda.current_stream().cuda_stream
        module, context = kernels.launcher(extension, 0, stream, True)
        for M, K, N, pitch in [(130, 272, 144, 144), (130, 272, 144, 288), (1, 16, 16, 48)]:
            a = recipes.quantize(uneven(M, K), Cast(E4M3, VECTORS), False)
            b = recipes.quantize(uneven(N, K), Cast(E4M3, SQUARES), False)
            y = Guarded((M, pitch), BF16, "cuda")
            call = Call(M=M, N=N, K=K, context=context, eight_bits=4, block_scales=1, pitch=pitch)
            call.z, call.z_scale, call.weight, call.weight_scale = (t.data_ptr() for t in (*a, *b))
            call.y = y.tensor.data_ptr()
            module.linear(ctypes.addressof(call))
            found = y.checked()
            exact = recipes.product(a, VECTORS, b, SQUARES, torch.float64)
            assert decibels(found[:, :N], exact) > 50
            assert found[:, N:].isnan().all()

    def test_rows_that_are_not_numbers_stay_in_their_rows(self) -> None:
        x, w = matrix(300, 512), matrix(256, 512, scale=0.05)
        x[3, 5], x[290, 400] = torch.nan, torch.inf
        y = fp8.scaled_linear(x, w, None, recipe="blockwise")
        bad = torch.zeros(300, dtype=torch.bool, device="cuda")
        bad[[3, 290]] = True
        assert not y[bad].isfinite().any()
        assert y[~bad].isfinite().all()

    @pytest.mark.parametrize("rows", [2048, 1001, 5])
    def test_steps_against_float64_and_the_reference(self, rows: int) -> None:
        torch.manual_seed(0)
        x, w = matrix(rows, 1040), matrix(1552, 1040, scale=1 / 32)
        b, dy = matrix(1552), matrix(rows, 1552)

        def step() -> list[Tensor]:
            return gradients(
                lambda x, w, b: fp8.scaled_linear(x, w, b, recipe="blockwise"), x, w, b, dy
            )

        found, names = ran(step)
        # The forward and the gradient of x.
        assert any("block_scaled" in name for name in names), names
        assert any("quantize_blocks_squ" in name for name in names), names
        exact = gradients(F.linear, *(t.double() for t in (x, w, b, dy)))
        names_of = ("y", "dx", "dweight")
        for name, a, e in zip(names_of, found, exact, strict=False):
            assert decibels(a, e) > (50 if name == "dweight" else LEAST), name
        assert all(torch.equal(one, other) for one, other in zip(found, step(), strict=True))
        cpu = [t.cpu() for t in (x, w, b, dy)]
        reference = gradients(lambda x, w, b: fp8.scaled_linear(x, w, b, recipe="blockwise"), *cpu)
        for a, e in zip(found, reference, strict=True):
            assert decibels(a.cpu(), e) > 48

    @pytest.mark.filterwarnings("ignore:fused_norm has no kernels for torch.float64")
    @pytest.mark.parametrize("activation", ["gelu", "swiglu"])
    @pytest.mark.parametrize("is_pair", [False, True])
    def test_mlp_steps(self, activation: str, is_pair: bool) -> None:
        if is_pair and activation == "gelu":
            pytest.skip("no gate")
        torch.manual_seed(1)
        gates = activation == "swiglu"
        count = 2 if is_pair else 1
        size = 2 * 528 // count if gates else 528
        ws = [matrix(size, 272, scale=1 / 16) for _ in range(count)]
        bs = [matrix(size) for _ in range(count)]
        out, x = matrix(272, 528, scale=1 / 20), matrix(300, 272)

        def step(recipe: str | None, *given: Tensor) -> list[Tensor]:
            x, out, *rest = (t.detach().requires_grad_() for t in given)
            ws, bs = tuple(rest[:count]), tuple(rest[count:])
            layers = (ws, bs) if is_pair else (ws[0], bs[0])
            y = fn.norm_mlp(
                x, *layers, out, activation=activation, normalization="rms_norm", recipe=recipe
            )
            dy = torch.ones_like(y).cumsum(0) / 100
            return [y.detach(), *torch.autograd.grad(y, (x, out, *ws), dy)]

        found, names = ran(lambda: step("blockwise", x, out, *ws, *bs))
        assert any("block_scaled" in name for name in names), names
        exact = step(None, *(t.double() for t in (x, out, *ws, *bs)))
        for a, e in zip(found, exact, strict=True):
            # Up to four products of FP8 lie between.
            assert decibels(a, e) > LEAST - 6
        with torch.no_grad():
            layers = (tuple(ws), tuple(bs)) if is_pair else (ws[0], bs[0])
            how = {"activation": activation, "normalization": "rms_norm", "recipe": "blockwise"}
            y = fn.norm_mlp(x, *layers, out, **how)
        assert decibels(y, exact[0]) > LEAST - 6

    def test_frozen_weights_and_graphs(self) -> None:
        layer = fn.LayerNormLinear(1024, 1552, recipe="blockwise", dtype=BF16, device="cuda").eval()
        # Weights that train have other scales.
        layer.requires_grad_(False)
        x = matrix(200, 1024)
        with torch.no_grad():
            expected = layer(x)
            fn.freeze(layer)
            assert torch.equal(layer(x), expected)
            y, names = ran(lambda: layer(x))
            assert torch.equal(y, expected)
            assert not any("quantize_blocks_squ" in name for name in names)
            assert torch.equal(replayed(layer, x), expected)

    @pytest.mark.usefixtures("back_to_back")
    def test_rows_written_just_before(self) -> None:
        """No kernel starts with what an earlier one has still to write."""
        x, w = matrix(4096, 1024), matrix(1024, 1024, scale=1 / 32)
        with torch.no_grad():
            expected = fn.norm_linear(x, w, recipe="blockwise")
            for _ in range(20):
                late = torch.zeros_like(x)
                torch.cuda._sleep(100_000)
                late.copy_(x)
                y = fn.norm_linear(late, w, recipe="blockwise")
                late.fill_(float("nan"))
                assert torch.equal(y, expected)

    def test_every_size_is_close_to_the_reference(self) -> None:
        generator = torch.Generator().manual_seed(0)
        most = (2000, 150, 150)
        for _ in range(20):
            M, K, N = (int(torch.randint(1, top, (), generator=generator)) for top in most)
            x, w = uneven(M, 16 * K), matrix(16 * N, 16 * K, scale=0.05)
            q = recipes.quantize(x, Cast(E4M3, VECTORS), True)
            by = recipes.quantize(w, Cast(E4M3, SQUARES), True)
            y = scaled.linear(*q, *by, *HOW, True, None, None, "", BF16)
            exact = recipes.product(q, VECTORS, by, SQUARES, torch.float64)
            assert decibels(y, exact) > 50, (M, 16 * K, 16 * N)


@pytest.mark.parametrize(("plain", "transposed"), [(True, False), (False, True), (True, True)])
def test_registration(plain: bool, transposed: bool) -> None:
    from torch.testing._internal.optests import opcheck

    v = torch.randn(20, 256).bfloat16()
    arguments = (v, False, SQUARES, True, plain, transposed)
    opcheck(torch.ops.fused_norm.fp8_quantize.default, arguments)
