"""A Linear layer by itself on Hopper, behind a pass over its rows: forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import family
import pytest
import torch
import torch.nn.functional as F
from accuracy import as_float64, assert_within_budget
from devices import ON_HOPPER
from family import PLAIN
from launches import names
from linears import ROWS, case_of
from strategies import hopper_goes, our_products_run
from torch import Tensor

import fused_norm as fn
from fused_norm.call import record
from fused_norm.ops import node

SHAPES = {
    # M 8400 and 16400, ragged tiles in both directions, K not a multiple of a k block.
    "many rows": ((8, 1050), 1000, 1088),
    "wide": ((4, 4100), 768, 2304),
}


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("dtype", family.LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients(
    name: str,
    shape: str,
    dtype: torch.dtype,
    in_python: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if in_python:
        monkeypatch.setattr(node, "forward", lambda *_, **__: None)
    with our_products_run():
        _check_values_and_gradients(case_of(name, dtype=dtype, shape=SHAPES[shape]), shape)


def _check_values_and_gradients(case: dict[str, Any], shape: str) -> None:
    tensors = family.make_tensors(case, "cuda")
    family.check(case, tensors)
    launched = names(lambda: family.ours(case, tensors))
    activation = case["activation"]
    what = "gate" if activation in family.GATES else "activate"
    assert (what in launched) == (activation is not None), launched
    assert "ping_pong" in launched, launched
    if case["op"] == "norm_linear":
        assert not any(name in launched for name in ("nvjet", "gemm")), launched
    total = sum(result.sum() for result in family.ours(case, tensors))
    launched = names(lambda: total.backward())
    # PyTorch's product adds to the rows' other gradients, and the longer sums over two layers.
    is_alone = case["weights"] == 1
    expected = (not case["return_norm"] and (is_alone or shape != "wide")) + is_alone
    assert launched.count("fused_norm_matrix") >= expected, launched


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("weights", [1, 2])
def test_gradient_of_the_sum_in_the_product(
    weights: int, normalization: str, in_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that computes dz adds the sum's other gradient: whole blocks, and edges."""
    if in_python:
        monkeypatch.setattr(node, "forward", lambda *_, **__: None)
    case = PLAIN | {"dtype": torch.bfloat16, "residual": True, "return_sum": True}
    # A gradient of the weight whose tiles fill the device: other sizes are declined for that.
    outputs = 3576 if weights == 1 else 2064
    case |= {"normalization": normalization, "weights": weights, "shape": ((10410,), 2056, outputs)}
    if weights == 2:
        case |= {"activation": "swiglu"}
    tensors = family.make_tensors(case, "cuda")
    family.check(case, tensors)
    total = sum(result.sum() for result in family.ours(case, tensors))
    launched = names(lambda: total.backward())
    assert "_passes_on_and_adds" in launched, launched


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("activation", family.ACTIVATIONS[1:])
def test_every_activation(activation: str) -> None:
    for count in (1, 2) if activation in family.GATES else (1,):
        case = case_of("GELU", activation=activation, weights=count, shape=((8, 1050), 256, 1000))
        family.check(case, family.make_tensors(case, "cuda"))


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", family.LOW, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "reglu"])
def test_few_rows(activation: str, rows: int, dtype: torch.dtype) -> None:
    """Gates of two weights and of one, h kept and not, biases or none, columns of half a tile."""
    what = "_halves_gate" if activation in family.GATES else "_activate"
    what = f"few_rows_{str(dtype).removeprefix('torch.')}_16_False{what}"
    for count in (1, 2) if activation in family.GATES else (1,):
        # Boxes of h end where its halves do. The last have more tiles than an H100 has clusters.
        for outputs, bias in ((1088, True), (1000, False), (10304, True)):
            options = {"activation": activation, "weights": count, "bias": bias, "dtype": dtype}
            case = case_of("GELU", **options, shape=((rows,), 1056, outputs))
            tensors = family.make_tensors(case, "cuda")
            family.check(case, tensors)
            with torch.no_grad():
                launched = names(lambda c=case, t=tensors: family.ours(c, t))
                assert what in launched, launched
                found, bar = family.ours(case, tensors)[0], family.eager(case, tensors)[0]
            exact = family.eager(case, family.replaced(tensors, as_float64))[0]
            assert_within_budget("y", found, exact.detach(), bar)


@pytest.fixture(params=["composed", "folded", "kept"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have Hopper's forward go one way."""
    strategies = {"composed": record.FUSED, "folded": record.NEW_FOLD, "kept": record.KEPT_FOLD}
    without = {"composed": record.FUSED}.get(request.param, record.NEW_FOLD)
    with hopper_goes(without, strategies[request.param]):
        yield request.param


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["residual", "statistics"])
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("leading", [(8400,), (300,), (24,)], ids=str)
def test_sums_and_given_statistics(
    strategy: str, leading: tuple[int], normalization: str, rows: str
) -> None:
    """Before every strategy a pass adds, and computes the statistics that are not given."""
    case = PLAIN | {"dtype": torch.bfloat16, "residual": True, "normalization": normalization}
    case |= {"shape": (leading, 1024, 1032), "return_sum": rows == "residual"}
    case |= {"statistics": rows == "statistics"}
    tensors = family.make_tensors(case, "cuda")
    family.check(case, tensors)
    with torch.no_grad(), fn.frozen_parameters():
        first = family.ours(case, tensors)
        for _ in range(3):
            # Parameters are frozen from the second call on.
            again = family.ours(case, tensors)
        launched = names(lambda: family.ours(case, tensors))
        exact = family.eager(case, family.replaced(tensors, as_float64))
        low = family.eager(case, tensors)
    folds = strategy != "composed"
    assert ("scale" in launched) == folds, launched
    assert "row_statistics" not in launched, launched
    assert ("fold_bfloat16" in launched) == (folds and strategy == "folded"), launched
    for results in (first, again):
        for result, truth, bar in zip(results, exact, low, strict=True):
            assert_within_budget("result", result, truth.detach(), bar)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "features"), [(16384, 4096), *((132 * n + 1, 8192) for n in (1, 4, 8, 16, 32))]
)
@pytest.mark.usefixtures("back_to_back")
def test_a_product_waits_for_the_rows_of_a_pass(strategy: str, rows: int, features: int) -> None:
    """With a fold that is kept, the pass is all that is queued before: too early, a row is old.

    The last of an odd number of rows is late: with most multiprocessors the pass is through.
    """
    case = PLAIN | {"dtype": torch.bfloat16, "residual": True, "return_sum": True}
    tensors = family.make_tensors(case | {"shape": ((rows,), features, 256)}, "cuda")
    with torch.no_grad():
        for scale in range(1, 12):
            tensors["x"].mul_(-scale / 4)
            y, total = family.ours(case, tensors)
            torch.cuda.synchronize()
            z = F.layer_norm(total.double(), (features,)) * tensors["norm_weight"]
            z = z + tensors["norm_bias"]
            exact = F.linear(z, tensors["weight"][0].double(), tensors["bias"][0].double())
            assert (y.double() - exact).abs().max() <= 0.05, scale


@ON_HOPPER
@pytest.mark.gpu
def test_graphs_replay_the_same_bits() -> None:
    """Replays follow one another without a gap: each product waits for the pass before it."""
    case = case_of("a weight's gate", shape=SHAPES["many rows"], return_sum=True)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        tensors = family.make_tensors(case, "cuda")
        leaves = list(family.leaves(tensors).values())

        def step() -> list[Tensor]:
            outputs = family.ours(case, tensors)
            return [*outputs, *torch.autograd.grad(outputs, leaves, [y * 0.1 for y in outputs])]

        expected = step()
        assert all(map(torch.equal, expected, step()))
        with torch.cuda.graph(graph, stream=side):
            captured = step()
        for _ in range(3):
            for result in captured:
                result.detach().fill_(float("nan"))
            graph.replay()
            graph.replay()
            assert all(map(torch.equal, captured, expected))
    torch.cuda.current_stream().wait_stream(side)


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.usefixtures("back_to_back")
def test_weights_written_just_before() -> None:
    """Few rows: what is read ahead of the rows is the weight as it is now."""
    x, residual = (torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for value in range(1, 30):
            weight.fill_(value)
            y = fn.norm_linear(x, weight, residual=residual)
            z = F.layer_norm(x + residual, (1024,)).double()
            exact = value * z.sum(-1, keepdim=True)
            size = value * z.abs().sum(-1, keepdim=True)
            assert ((y.double() - exact).abs() <= 0.01 * size).all()
