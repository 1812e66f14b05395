"""Hopper's kernels that store an MLP's hidden rows in FP8, with one scale that a bound gives."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes, replayed
from fp8_bounds import (
    BOUNDED,
    CASES,
    CHANGES,
    CHANGES_OF_GATES,
    EXACT,
    NORMS,
    adversarial,
    assert_clean_but_for,
    exact,
    exact_hidden,
    frozen,
    heavy_tails,
    hidden_of,
    layer,
    matrix,
    operands,
    same,
    scales,
    tailed,
    with_own_powers_of_two,
)
from fp8_products import LEAST, SHORT, decibels
from kernel_harness import Guarded
from test_fp8_blocks import on_hopper, ran
from torch import Tensor

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import ACTIVATIONS, is_gate
from fused_norm.call.record import Call
from fused_norm.chain import kernels
from fused_norm.native import build
from fused_norm.ops import hidden_scale
from fused_norm.recipes import E4M3

pytestmark = [*on_hopper, pytest.mark.usefixtures("no_grad")]
OPS = torch.ops.fused_norm
# Of one tile and a part of a second, odd ones, many; outputs that are not a multiple of a tile's.
SIZES = [(129, 1040, 1152), (300, 272, 384), (1001, 128, 272), (133, 4096, 16), (140, 16, 208)]
SIZES += [(257, 144, 1552), (513, 2048, 4112), (4096, 256, 3072), (2049, 1024, 4096)]
GELU_AND_SWIGLU = pytest.mark.parametrize("activation", ["gelu", "swiglu"])


def on(device: str, given: list[Any]) -> list[Any]:
    return [v.to(device) if isinstance(v, Tensor) else v for v in given]


def stays(names: list[str]) -> bool:
    return any("in_8_bits" in name for name in names)


@pytest.mark.parametrize(("activation", "is_pair"), EXACT)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bits(activation: str, is_pair: bool, scaling: str, has_bias: bool) -> None:
    """Where no sum is rounded, all bits are those of PyTorch's ops, in tiles of either width."""
    seen = list[str]()
    for size in SIZES:
        given = operands(*size, activation, has_bias, scaling, is_pair=is_pair)
        # Rows of zeros.
        given[0].view(torch.uint8)[size[0] // 2] = 0
        expected = OPS.fp8_hidden_by_python(*given)
        gpu = on("cuda", given)
        found, names = ran(lambda gpu=gpu: OPS.fp8_hidden(*gpu))
        assert stays(names), names
        seen += names
        assert same(found, expected), size
        assert all(same(found, OPS.fp8_hidden(*gpu)) for _ in range(3))
    for columns in (128, 192):
        tiles = [name for name in seen if f"128x{columns}" in name and "in_8_bits" in name]
        assert tiles, columns
        assert all(("halves" in name) == is_gate(activation) for name in tiles)


@pytest.mark.parametrize(("activation", "is_pair"), CASES)
def test_activations(activation: str, is_pair: bool) -> None:
    for size in ((777, 1040, 1024), (133, 4096, 400), (2048, 512, 3072)):
        given = on("cuda", operands(*size, activation, True, is_pair=is_pair))
        # Results about as large as one, and of a gate each of its factors.
        factors = 2 if is_gate(activation) else 1
        factor = 2.0 ** -round(torch.tensor(given[-1] * 448.0).log2().item() / factors - 2)
        given[1], given[-1] = given[1] * factor, given[-1] * factor**factors
        for bias in (given[7], given[12]):
            if bias is not None:
                bias *= factor
        found, theirs = (op(*given) for op in (OPS.fp8_hidden, OPS.fp8_hidden_by_python))
        wide = [recipes.dequantize(*v, "row", torch.float64) for v in (found, theirs)]
        truth = exact(given)
        assert decibels(wide[0], truth) > decibels(wide[1], truth) - SHORT, size
        assert decibels(*wide) > 35, size


def test_every_size() -> None:
    generator = torch.Generator().manual_seed(0)
    for i in range(30):
        M, K, N = (int(torch.randint(1, top, (), generator=generator)) for top in (1500, 100, 150))
        activation, is_pair = EXACT[i % len(EXACT)]
        how = (activation, i % 2 == 0, ("row", "tensor")[i % 2])
        given = operands(M + 128, 16 * K, 16 * N, *how, is_pair=is_pair)
        found = OPS.fp8_hidden(*on("cuda", given))
        assert same(found, OPS.fp8_hidden_by_python(*given)), (M + 128, 16 * K, 16 * N)


@pytest.mark.parametrize(("activation", "is_pair"), [("relu", False), ("reglu", True)])
def test_nothing_is_written_beyond_the_results(activation: str, is_pair: bool) -> None:
    extension = build.Extension(build.FP8_EXTENSION, "bfloat16", "nvidia:sm_90a")
    stream = torch.cuda.current_stream().cuda_stream
    module, context = kernels.launcher(extension, 0, stream, True)
    sizes = [(130, 272, 144), (1, 16, 16), (257, 144, 400), (128, 128, 128), (4100, 64, 976)]
    for M, K, N in sizes:
        given = operands(M, K, N, activation, True, is_pair=is_pair)
        expected = OPS.fp8_hidden_by_python(*given)
        gpu = on("cuda", given)
        y = Guarded((M, N), torch.uint8, "cuda")
        scale = Guarded((M, 1), torch.float32, "cuda")
        call = Call(M=M, N=N, K=K, context=context, eight_bits=4, y_one_scale=given[-1])
        call.activation = ACTIVATIONS[activation].number
        call.z, call.z_scale, call.weight, call.weight_scale = (t.data_ptr() for t in gpu[:4])
        call.bias = gpu[7].data_ptr()
        if is_pair:
            call.up, call.up_scale, call.up_bias = (t.data_ptr() for t in gpu[10:13])
        call.y, call.y_scale = y.tensor.data_ptr(), scale.tensor.data_ptr()
        module.linear(ctypes.addressof(call))
        assert same([y.checked().view(E4M3), scale.checked()], expected)


@pytest.mark.parametrize(("activation", "is_pair"), EXACT)
def test_what_exceeds_a_bound_is_not_a_number(activation: str, is_pair: bool) -> None:
    """A kernel saturates nothing that it was promised not to meet."""
    for M, K, N in ((300, 144, 272), (4096, 256, 3072)):
        given = operands(M, K, N, activation, True, is_pair=is_pair)
        given[-1] /= 4
        exceeds = (exact(given).to(torch.bfloat16).abs() > 448 * given[-1]).any(1)
        assert 0 < int(exceeds.sum()) < M
        found = recipes.dequantize(*OPS.fp8_hidden(*on("cuda", given)), "row", torch.float32).cpu()
        assert torch.equal(found.isnan().any(1), exceeds)
        expected = recipes.dequantize(*OPS.fp8_hidden_by_python(*given), "row", torch.float32)
        assert torch.equal(found[~exceeds], expected[~exceeds])


@GELU_AND_SWIGLU
@pytest.mark.parametrize("normalization", NORMS)
def test_rows_that_are_no_numbers(normalization: str, activation: str) -> None:
    mlp, x = frozen(normalization, activation, device="cuda"), matrix(300, 256).cuda()
    clean = mlp(x)
    x[3, 5], x[290, 7] = torch.nan, torch.inf
    assert_clean_but_for(mlp(x), clean, [3, 290])


@pytest.mark.parametrize(("activation", "change"), BOUNDED)
@pytest.mark.parametrize("normalization", NORMS)
def test_no_row_exceeds_the_bound(normalization: str, activation: str, change: Any) -> None:
    mlp = frozen(normalization, activation, change, device="cuda")
    x = adversarial(mlp, 384)
    with scales() as used:
        found = hidden_of(mlp, x)
    assert used[0] > 0
    assert found.isfinite().all()
    assert 0.2 < float(found.abs().max()) / (448 * used[0]) <= 1
    assert mlp(x).isfinite().all()


@pytest.mark.parametrize("change", [None, heavy_tails])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_tailed", [False, True])
def test_precision(normalization: str, activation: str, change: Any, is_tailed: bool) -> None:
    gates = is_gate(activation)
    # With heavy tails, the bound of a gate of more features is too far from typical values.
    K = 256 if gates else 1024
    mlp = frozen(normalization, activation, change, size=(K, 4096), device="cuda")
    x = (tailed(2000, K) if is_tailed else matrix(2000, K)).cuda()
    truth = exact_hidden(mlp, x)
    with scales() as used:
        ours = hidden_of(mlp, x)
    assert used[0] > 0
    with scales(fewest=1 << 40):
        theirs = hidden_of(mlp, x)
    # A product of two products has the noise of both. Of its rows, the largest number has a larger
    # part of the energy.
    assert decibels(ours, truth) > decibels(theirs, truth) - SHORT - 0.15 * gates
    assert decibels(ours, truth) > LEAST - 2.5 * gates
    assert abs(decibels(ours, truth) - decibels(with_own_powers_of_two(mlp, x), truth)) < 0.05
    noise, least = ((v - truth).norm(dim=1) / truth.norm(dim=1) for v in (ours, theirs))
    assert noise.max() < 1.3 * least.max()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("rows", [16, 128, 129, 301, 4096])
@pytest.mark.parametrize("residual", [False, True])
@GELU_AND_SWIGLU
def test_mlp(recipe: str, rows: int, residual: bool, activation: str) -> None:
    mlp = layer(activation=activation, recipe=recipe, size=(1024, 4096)).cuda()
    x = matrix(rows, 1024).cuda()
    more = {"residual_out": x} if residual else {}
    by_rows = mlp(x, **more)
    fn.freeze(mlp)
    mlp(x, **more)
    found, names = ran(lambda: mlp(x, **more))
    assert stays(names) == (rows > 128), names
    assert all(torch.equal(mlp(x, **more), found) for _ in range(3))
    if rows > 128:
        if recipe == "rowwise" and not residual:
            assert sum("fused_norm" in name for name in names) <= 3, names
        assert decibels(found, by_rows) > LEAST
    else:
        assert torch.equal(found, by_rows)
    # Another freezing of other values has another bound.
    fn.unfreeze(mlp)
    mlp.layer_norm_weight.mul_(512)
    fn.freeze(mlp)
    assert mlp(x, **more).isfinite().all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "fused_norm"])
@GELU_AND_SWIGLU
def test_compiled(backend: str, activation: str) -> None:
    mlp = frozen(activation=activation, size=(1024, 4096), device="cuda")
    x = matrix(512, 1024).cuda()
    expected = mlp(x)
    torch.compiler.reset()
    compiled: Any = torch.compile(mlp, backend=backend, fullgraph=True)
    found, names = ran(lambda: [compiled(x) for _ in range(2)][1])
    assert stays(names), names
    assert torch.equal(found, expected)


@GELU_AND_SWIGLU
def test_offloaded(activation: str) -> None:
    x = matrix(300, 256).cuda()
    expected = frozen(activation=activation, device="cuda")(x)
    mlp = fn.freeze(layer(activation=activation, device="cuda"), offload=True)
    assert all(torch.equal(mlp(x), expected) for _ in range(3))


@GELU_AND_SWIGLU
@pytest.mark.usefixtures("back_to_back")
def test_graphs_and_rows_written_just_before(activation: str) -> None:
    """No kernel starts with what an earlier one has still to write."""
    mlp = frozen(activation=activation, size=(256, 1024), device="cuda")
    x = matrix(2048, 256).cuda()
    assert_same_in_graphs_and_after_writes(mlp, x)


@GELU_AND_SWIGLU
def test_a_graph_that_captures_the_first_call(activation: str) -> None:
    """It may not wait for a bound, so each row has its own scale."""
    mlp, x = layer(activation=activation, device="cuda"), matrix(300, 256).cuda()
    expected = mlp(x)

    def unfrozen(rows: Tensor) -> None:
        mlp(rows)
        fn.freeze(mlp)

    assert torch.equal(replayed(mlp, x, first=unfrozen), expected)
    assert not torch.equal(mlp(x), expected)


def test_the_same_scale_as_on_a_cpu() -> None:
    cases = [("gelu", change) for change in CHANGES]
    cases += [("swiglu", change) for change in CHANGES_OF_GATES]
    for normalization, (activation, change) in itertools.product(NORMS, cases):
        found = list[float]()
        for device in ("cpu", "cuda"):
            with scales() as used:
                mlp = fn.freeze(layer(normalization, activation, change).to(device))
                mlp(matrix(hidden_scale.FEWEST_ROWS, 256).to(device))
            found += used
        assert found[0] == found[1] > 0
