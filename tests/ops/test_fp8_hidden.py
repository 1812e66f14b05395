"""An MLP's hidden rows that stay in FP8, with scales of blocks: products that quantize."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes
from fp8_bounds import same
from fp8_kernels import running
from fp8_products import LEAST, SHORT, decibels
from kernel_harness import Guarded
from test_fp8_blocks import SQUARES, VECTORS, on_hopper, ran
from torch import Tensor
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import ACTIVATIONS, GATED, activated, is_gate
from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.recipes import E4M3, Cast

BF16 = torch.bfloat16
HOW = (VECTORS, SQUARES)
OPS = torch.ops.fused_norm
# The norm's gamma and beta, whether rows have a bound, the norm's offset, and one scale for all.
NO_BOUND = [None, None, False, 0.0, 0.0]
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CASES = [
    (name, is_pair)
    for name, is_pair in itertools.product(ACTIVATIONS, (False, True))
    if is_gate(name) or not is_pair
]
EXACT = [case for case in CASES if case[0] in ("relu", "reglu")]


def matrix(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    torch.manual_seed(seed)
    return (torch.randn(*shape) * scale).to(BF16)


def whole_numbers(M: int, N: int, scaling: str, seed: int) -> list[Tensor]:
    """Return a matrix whose products have no rounding: small whole numbers, and powers of two."""
    torch.manual_seed(seed)
    q = torch.randint(-2, 3, (M, N)).float().to(E4M3)
    rows = M if scaling == VECTORS else -(-M // 128)
    return [q, torch.randint(-1, 3, (rows, -(-N // 128))).float().exp2()]


def quantized(M: int, N: int, scaling: str, seed: int) -> list[Tensor]:
    """Return a matrix whose rows and columns have sizes of their own."""
    torch.manual_seed(seed)
    down, across = (torch.randn(n).exp() for n in (M, N))
    v = torch.randn(M, N) * down[:, None] * across
    return [*recipes.quantize(v.to(BF16), Cast(E4M3, scaling), False)]


def operands(
    M: int, K: int, N: int, activation: str, is_pair: bool, make: Any, rounds: bool, has_bias: bool
) -> list[Any]:
    """Return what the op is called with for M rows, K features and N hidden features."""
    gates = is_gate(activation) and not is_pair
    size = 2 * N if gates else N
    biases = [(torch.arange(size) % 7 - 3.0 + i).to(BF16) if has_bias else None for i in (0, 1)]
    weights = [make(size, K, SQUARES, seed=i) for i in (1, 2)]
    if make is quantized:
        # Results about as large as one.
        for _, scales in weights:
            scales /= K**0.5
    up = [*weights[1], biases[1]] if is_pair else [None] * 3
    given = [*make(M, K, VECTORS, seed=0), *weights[0], *HOW, rounds, biases[0], activation, BF16]
    return [*given, *up, False, *NO_BOUND]


def on(device: str, given: list[Any]) -> list[Any]:
    return [v.to(device) if isinstance(v, Tensor) else v for v in given]


def exact(given: list[Any]) -> Tensor:
    """Return the activation in float64."""
    q, scale, weight, own, *_, bias, activation, _, up, up_scale, up_bias, _ = given[:-5]

    def layer(weight: Tensor, own: Tensor, bias: Tensor | None) -> Tensor:
        y = recipes.product((q, scale), VECTORS, (weight, own), SQUARES, torch.float64)
        return y if bias is None else y + bias.double()

    h = layer(weight, own, bias)
    if up is not None:
        h = torch.cat([h, layer(up, up_scale, up_bias)], 1)
    return activated(activation, h)


def whole(matrix: list[Tensor]) -> Tensor:
    """Return the values of a matrix in 8 bits."""
    q, scale = (v.cpu() for v in matrix)
    return recipes.dequantize(q, scale, VECTORS, torch.float64)


@pytest.mark.parametrize(("activation", "is_pair"), CASES)
@pytest.mark.parametrize("N", [128, 272, 16])
def test_chain(activation: str, is_pair: bool, N: int, tmp_path: Path) -> None:
    """By one kernel, but of few rows, and of halves of a gate that share a block of scales."""
    for M, has_bias, rounds in ((129, True, False), (140, False, True), (128, True, True)):
        given = operands(M, 144, N, activation, is_pair, quantized, rounds, has_bias)
        expected = OPS.fp8_hidden(*given)
        truth = [*recipes.quantize(exact(given).to(BF16), Cast(E4M3, VECTORS), rounds)]
        assert decibels(whole(expected), whole(truth)) > 50
        with running(tmp_path) as ran:
            found = OPS.fp8_hidden(*given)
        names = [name for name, _ in ran]
        if M < 129:
            assert names[-1] == "quantize"
            # No worse than what is rounded once less.
            ours, theirs = (decibels(whole(v), exact(given)) for v in (found, expected))
            assert ours > theirs - 1.5
        elif is_pair or not is_gate(activation) or N % 128 == 0:
            assert names == ["linear"]
            assert same(found, expected)
        else:
            assert names == ["linear", "quantize"]
            # What a pass activates has been rounded once more.
            assert decibels(whole(found), whole(expected)) > 35


def test_what_the_kernel_does_not_take(tmp_path: Path) -> None:
    """Scales of rows, biases of another dtype or of one layer alone, and no activation's."""
    x, w = matrix(40, 128), matrix(128, 128, seed=1)
    q, scale = recipes.quantize(x, Cast(E4M3, "row"), False)
    by, own = recipes.quantize(w, Cast(E4M3, "row"), False)
    given = [q, scale, by, own, "row", "row", False, None, "gelu", BF16, *[None] * 3, False]
    given += NO_BOUND
    with running(tmp_path) as names:
        found = OPS.fp8_hidden(*given)
        assert found[1].shape == (40, 1)
        assert [name for name, _ in names] == ["linear", "quantize"]
    given = operands(140, 128, 128, "swiglu", True, quantized, False, True)
    given[12] = given[12].float()
    expected = OPS.fp8_hidden(*given)
    with running(tmp_path) as names:
        assert same(OPS.fp8_hidden(*given), expected)
        assert [name for name, _ in names] == ["quantize"]


@pytest.mark.parametrize(("activation", "is_pair"), [("gelu", False), ("swiglu", True)])
def test_registration(activation: str, is_pair: bool, tmp_path: Path) -> None:
    given = operands(140, 64, 48, activation, is_pair, quantized, True, True)
    opcheck(OPS.fp8_hidden.default, tuple(given), test_utils=OF_8_BITS)
    with running(tmp_path) as names:
        opcheck(OPS.fp8_hidden.default, tuple(given), test_utils=OF_8_BITS)
    assert names
    given[2:4] = matrix(48, 64), None
    opcheck(OPS.fp8_hidden.default, tuple(given), test_utils=OF_8_BITS)
    given[:2] = given[0][:0], given[1][:0]
    assert [tuple(v.shape) for v in OPS.fp8_hidden(*given)] == [(0, 48), (0, 1)]


def layer(activation: str, has_bias: bool = True, hidden: int = 384) -> fn.LayerNormMLP:
    torch.manual_seed(3)
    how: dict[str, Any] = {"activation": activation, "bias": has_bias, "recipe": "blockwise"}
    mlp = fn.LayerNormMLP(272, hidden, normalization="RMSNorm", dtype=BF16, **how)
    # Weights that train have other scales.
    return mlp.eval().requires_grad_(False)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("residual", [False, True])
def test_mlp(activation: str, residual: bool, tmp_path: Path) -> None:
    """Three launches: the hidden rows are written once, in 8 bits."""
    mlp, x = layer(activation), matrix(2, 70, 272)
    more = {"residual_out": x} if residual else {}
    with torch.no_grad():
        expected = mlp(x, **more)
        truth = mlp.double()(x.double(), **{k: v.double() for k, v in more.items()})
        mlp = mlp.to(BF16)
        with running(tmp_path) as names:
            found = mlp(x, **more)
            assert "quantize" in [name for name, _ in names]
            fn.freeze(mlp)
            assert torch.equal(mlp(x, **more), found)
            names.clear()
            assert torch.equal(mlp(x, **more), found)
        assert [name for name, _ in names] == ["normalize", "linear", "linear"]
    assert decibels(found, expected) > 50
    assert decibels(found, truth) > decibels(expected, truth) - SHORT


def test_compiled() -> None:
    mlp, x = layer("swiglu"), matrix(2, 70, 272)
    with torch.no_grad():
        expected = mlp(x)
        torch.compiler.reset()
        assert torch.equal(torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), expected)


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize(("activation", "is_pair"), EXACT)
    @pytest.mark.parametrize("rounds", [False, True])
    def test_bits(self, activation: str, is_pair: bool, rounds: bool) -> None:
        """Where no sum is rounded, all bits are those of PyTorch's ops."""
        sizes = [(300, 272, 384), (129, 1040, 1152), (1001, 128, 256), (133, 4096, 128)]
        sizes += [(140, 16, 128)]
        if is_pair or not is_gate(activation):
            sizes += [(200, 144, 16), (513, 272, 1552), (164, 80, 144), (260, 2048, 4112)]
        for (M, K, N), has_bias in itertools.product(sizes, (False, True)):
            given = operands(M, K, N, activation, is_pair, whole_numbers, rounds, has_bias)
            # Rows of zeros.
            given[0].view(torch.uint8)[M // 2] = 0
            expected = OPS.fp8_hidden_by_python(*given)
            gpu = on("cuda", given)
            found, names = ran(lambda gpu=gpu: OPS.fp8_hidden(*gpu))
            assert any("in_8_bits" in name for name in names), names
            assert same(found, expected), (M, K, N, has_bias)
            assert all(same(found, OPS.fp8_hidden(*gpu)) for _ in range(3))

    @pytest.mark.parametrize(("activation", "is_pair"), CASES)
    def test_activations(self, activation: str, is_pair: bool) -> None:
        sizes = [(777, 1040, 1024, False), (133, 4096, 384, True), (2048, 512, 640, False)]
        for M, K, N, rounds in sizes:
            given = operands(M, K, N, activation, is_pair, quantized, rounds, True)
            reference = OPS.fp8_hidden_by_python(*given)
            gpu = on("cuda", given)
            found = OPS.fp8_hidden(*gpu)
            assert all(same(found, OPS.fp8_hidden(*gpu)) for _ in range(3))
            truth = exact(given)
            # Sizes of rows differ, and so would what is wrong in one of them: each counts as much.
            size = truth.norm(dim=1, keepdim=True)
            ours, theirs, truth = whole(found) / size, whole(reference) / size, truth / size
            assert decibels(ours, truth) > decibels(theirs, truth) - SHORT, (M, K, N)
            # A number that is rounded to bfloat16 otherwise may be so to 8 bits.
            assert decibels(ours, theirs) > 35, (M, K, N)
            noise, least = ((v - truth).norm(dim=1).max() for v in (ours, theirs))
            assert noise < 1.2 * least, (M, K, N)

    @pytest.mark.parametrize(("activation", "is_pair"), [("gelu", False), ("swiglu", True)])
    def test_what_is_no_number_stays_in_its_row(self, activation: str, is_pair: bool) -> None:
        given = on("cuda", operands(300, 272, 400, activation, is_pair, quantized, False, True))
        clean = OPS.fp8_hidden(*given)
        given[1][3, 1], given[1][290, 0] = torch.nan, torch.inf
        q, scale = OPS.fp8_hidden(*given)
        bad = torch.zeros(300, dtype=torch.bool, device="cuda")
        bad[[3, 290]] = True
        assert not whole([q, scale])[[3, 290]].isfinite().any()
        assert same([q[~bad], scale[~bad]], [clean[0][~bad], clean[1][~bad]])

    @pytest.mark.parametrize("activation", ["relu", "reglu"])
    def test_nothing_is_written_beyond_the_results(self, activation: str) -> None:
        extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
        stream = torch.cuda.current_stream().cuda_stream
        module, context = kernels.launcher(extension, 0, stream, True)
        for M, K, N in [(130, 272, 144), (1, 16, 16), (257, 144, 400), (128, 128, 128)]:
            is_pair = is_gate(activation)
            given = operands(M, K, N, activation, is_pair, whole_numbers, False, True)
            expected = OPS.fp8_hidden_by_python(*given)
            gpu = on("cuda", given)
            y = Guarded((M, N), torch.uint8, "cuda")
            scale = Guarded((M, -(-N // 128)), torch.float32, "cuda")
            call = Call(M=M, N=N, K=K, context=context, eight_bits=4, block_scales=1)
            call.activation = ACTIVATIONS[activation].number
            assert (call.activation >= GATED) == is_pair
            call.z, call.z_scale, call.weight, call.weight_scale = (t.data_ptr() for t in gpu[:4])
            call.bias = gpu[7].data_ptr()
            if is_pair:
                call.up, call.up_scale, call.up_bias = (t.data_ptr() for t in gpu[10:13])
            call.y, call.y_scale = y.tensor.data_ptr(), scale.tensor.data_ptr()
            module.linear(ctypes.addressof(call))
            assert same([y.checked().view(E4M3), scale.checked()], expected)

    @pytest.mark.parametrize("activation", ["gelu", "swiglu"])
    @pytest.mark.parametrize("rows", [16, 128, 129, 300, 4096])
    def test_mlp(self, activation: str, rows: int) -> None:
        mlp, x = layer(activation, hidden=1152), matrix(rows, 272)
        with torch.no_grad():
            expected, truth = mlp(x), layer(activation, hidden=1152).double()(x.double())
            mlp, x = mlp.cuda(), x.cuda()
            fn.freeze(mlp)
            mlp(x)
            found, names = ran(lambda: mlp(x))
            # Of one tile of rows, a pass activates and quantizes the hidden ones.
            assert any("in_8_bits" in name for name in names) == (rows > 128), names
            assert decibels(found.cpu(), expected) > 35
            assert decibels(found.cpu(), truth) > LEAST - 6
            assert all(torch.equal(mlp(x), found) for _ in range(3))

    @pytest.mark.usefixtures("back_to_back")
    def test_graphs_and_rows_written_just_before(self) -> None:
        """No kernel starts with what an earlier one has still to write."""
        mlp, x = layer("swiglu", hidden=1024).cuda(), matrix(2048, 272).cuda()
        with torch.no_grad():
            fn.freeze(mlp)
            assert_same_in_graphs_and_after_writes(mlp, x)

    def test_every_size(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for i in range(20):
            M, K, N = (
                int(torch.randint(1, top, (), generator=generator)) for top in (1500, 100, 100)
            )
            # Fewer rows are no kernel's.
            M += 128
            activation, is_pair = (("relu", False), ("reglu", True))[i % 2]
            given = operands(M, 16 * K, 16 * N, activation, is_pair, whole_numbers, False, True)
            found = OPS.fp8_hidden(*on("cuda", given))
            assert same(found, OPS.fp8_hidden_by_python(*given)), (M, 16 * K, 16 * N)
