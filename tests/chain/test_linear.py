"""A Linear layer by itself on Hopper, behind a pass over its rows: forward and backward.

What is planned and what a record says is held to on any machine, the kernels on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import family
import pytest
import torch
import torch.nn.functional as F
from accuracy import as_float64, assert_within_budget
from family import PLAIN
from mojo_programs import h100_costs, needs_mojo, printed
from stand_in import standing_in
from strategies import hopper_goes, our_products_run
from test_grouped import ON_HOPPER, names
from torch import Tensor

import fused_norm as fn
from fused_norm.activations import ACTIVATIONS, GATED
from fused_norm.call import record
from fused_norm.ops import node

# M, K, N: whether a product alone is ours, one that is activated, one that gates and keeps h, one
# that adds a residual, and dy weight. By what was measured on an H100.
PLANS = {
    (16384, 768, 2304): (True, True, True, True, True),
    (16384, 4096, 12288): (True, True, True, True, True),
    (8192, 4096, 4096): (True, True, True, True, True),
    (16384, 1024, 1024): (True, True, True, True, True),
    (1024, 4096, 4096): (True, True, True, True, True),
    # PyTorch's product of dy and the weight shares its long sums between tiles.
    (2048, 768, 3072): (True, True, True, True, False),
    # Few rows share no pass of their own; very few have a kernel that activates.
    (64, 4096, 4096): (True, False, False, True, True),
    (64, 4096, 12288): (False, False, False, True, False),
    (16, 4096, 12288): (True, True, True, True, True),
    # Sums of one k block.
    (16, 64, 4096): (True, False, False, False, False),
    # Tiles that leave much of the device idle.
    (512, 1024, 1024): (True, False, False, False, False),
    # The last box of a gate's h would reach into its other half. dy weight has sums too long.
    (8192, 1024, 4136): (True, True, False, True, False),
    # Rows at no multiple of 16 bytes.
    (8192, 1024, 1028): (False, False, False, False, False),
}


@needs_mojo
def test_plan(tmp_path: Path) -> None:
    lines = printed("sm90_linear", h100_costs(tmp_path, "bfloat16"), PLANS)
    for (case, expected), line in zip(PLANS.items(), lines, strict=True):
        *found, in_float32, activated, shifted, invariant, _, _ = map(int, line.split())
        assert tuple(map(bool, found)) == expected, case
        assert not in_float32
        assert activated == record.DECLINED
        # What boxes cannot begin at is left to PyTorch, and what may not be, never.
        assert not shifted
        assert invariant == (case[2] != 1028)


@needs_mojo
def test_no_kept_fold_activates(tmp_path: Path) -> None:
    """On an H100, blocks with such folds took up to 0.11 of eager more than without (LLaMA 8B)."""
    cases = [(8192, 4096, 14336), (16384, 1024, 3072), (8192, 1600, 6400), (16448, 1024, 4096)]
    lines = printed("sm90_linear", h100_costs(tmp_path, "bfloat16"), cases)
    for case, line in zip(cases, lines, strict=True):
        assert list(map(int, line.split()))[-2:] == [record.FUSED] * 2, case


def _at(address: int, *shape: int) -> Tensor:
    """Return the bfloat16 matrix at an address."""
    memory = (ctypes.c_char * (2 * shape[0] * shape[1])).from_address(address)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)


def _activated(number: int, h: Tensor) -> Tensor:
    kinds = {ACTIVATIONS[name][0]: function for name, function in family.FUNCTIONS.items()}
    if number < GATED:
        return kinds[number](h)
    gate, up = h.chunk(2, -1)
    return kinds[number - GATED](gate) * up


# What test_grouped.py is about.
GROUPED = ("products", "input_gradients", "passed_rows")


class StandIn:
    """Kernels that find in a record what they compute with, by PyTorch on the CPU."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.declines: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Callable[[int], None]:
        def function(place: int) -> None:
            call = record.Call.from_address(place)
            if name.startswith("plan_"):
                planned = name.removeprefix("plan_")
                is_declined = planned in self.declines or (
                    call.activation != 0 and f"activated_{planned}" in self.declines
                )
                call.strategy = record.DECLINED if is_declined else record.FUSED
                return
            self.done.append(name)
            getattr(self, f"_{name}")(call)

        return function

    @staticmethod
    def _linear(call: record.Call) -> None:
        # Only what a pass has written may be read ahead of what else is queued.
        assert bool(call.x) != bool(call.z)
        rows = _at(call.x or call.z, call.M, call.K).float()
        halves = [(call.weight, call.bias)]
        if call.activation >= GATED:
            halves.append((call.up, call.up_bias))
        h = []
        for weight, bias in halves:
            h.append(rows @ _at(weight, call.N, call.K).float().t())
            if bias:
                h[-1] += _at(bias, 1, call.N)
        y = torch.cat(h, -1)
        if call.h:
            _at(call.h, call.M, y.shape[-1]).copy_(y)
        if call.activation:
            y = _activated(call.activation, y)
        if call.residual:
            y += _at(call.residual, call.M, call.N)
        _at(call.y, call.M, call.N).copy_(y)

    @staticmethod
    def _input_gradient(call: record.Call) -> None:
        dy, weight = _at(call.dy, call.M, call.N), _at(call.weight, call.N, call.K)
        _at(call.dx, call.M, call.K).copy_(dy.float() @ weight.float())

    @staticmethod
    def _weight_gradient(call: record.Call) -> None:
        dy, z = _at(call.dy, call.M, call.N).float(), _at(call.z, call.M, call.K).float()
        _at(call.dweight, call.N, call.K).copy_(dy.t() @ z)
        if call.dbias:
            _at(call.dbias, 1, call.N).copy_(dy.sum(0, keepdim=True))


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[StandIn]:
    """Put the stand-in in the place of Hopper's kernels."""
    stand_in = StandIn()
    stand_in.declines = GROUPED
    with standing_in(tmp_path, lambda name, place: getattr(stand_in, name)(place)):
        yield stand_in


# Options of a call, and what runs in its forward and in its backward.
ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "residual": (
        {"residual": True, "return_sum": True, "normalization": "rms_norm", "bias": False},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    "AdaLN": (
        {"modulation": "batch", "gamma": "missing", "beta": False},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    # What reaches the rows besides is added to by PyTorch's product.
    "norm returned": ({"return_norm": True}, ["linear"], ["weight_gradient"]),
    "GELU": (
        {"residual": True, "activation": "gelu"},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    "a weight's gate": (
        {"residual": True, "activation": "swiglu"},
        ["linear"],
        ["input_gradient", "weight_gradient"],
    ),
    "gate of two": ({"weights": 2, "activation": "geglu", "bias": True}, ["linear"], []),
    "gate of two, no bias": ({"weights": 2, "activation": "reglu", "bias": False}, ["linear"], []),
    "MLP": (
        {"op": "norm_mlp", "activation": "gelu", "residual_out": True},
        ["linear"] * 2,
        ["input_gradient", "weight_gradient"] * 2,
    ),
    "MLP without a residual, recomputed": (
        {"op": "norm_mlp", "activation": "swiglu", "recompute": True},
        ["linear"] * 2,
        ["linear", *["input_gradient", "weight_gradient"] * 2],
    ),
}
SHAPE = ((3, 8), 32, 24)


def case_of(name: str, **others: Any) -> dict[str, Any]:
    return PLAIN | {"dtype": torch.bfloat16, "shape": SHAPE} | ROWS[name][0] | others


@pytest.mark.parametrize("name", ROWS)
def test_records_say_what_to_compute(kernels: StandIn, name: str) -> None:
    case, (_, forward, backward) = case_of(name), ROWS[name]
    family.check(case, family.make_tensors(case), draws=1)
    assert kernels.done == forward + backward


@pytest.mark.parametrize("name", ROWS)
def test_what_is_declined_pytorch_multiplies(kernels: StandIn, name: str) -> None:
    kernels.declines = (*GROUPED, "linear", "input_gradient", "weight_gradient")
    case = case_of(name)
    family.check(case, family.make_tensors(case), draws=1)
    assert not kernels.done


def test_a_pass_activates_where_the_product_does_not(kernels: StandIn) -> None:
    kernels.declines = (*GROUPED, "activated_linear")
    case = case_of("GELU")
    family.check(case, family.make_tensors(case), draws=1)
    assert kernels.done == ["linear", "input_gradient", "weight_gradient"]


@pytest.mark.parametrize("name", ["residual", "MLP"])
def test_any_gradient_alone(kernels: StandIn, name: str) -> None:
    """Of two products, those that lead to it."""
    case = case_of(name)
    tensors = family.make_tensors(case)
    leaves = family.leaves(tensors)
    grads = [torch.randn_like(result) for result in family.ours(case, tensors)]
    every = torch.autograd.grad(family.ours(case, tensors), list(leaves.values()), grads)
    for leaf, expected in zip(leaves, every, strict=True):
        for other, tensor in leaves.items():
            tensor.requires_grad_(other == leaf)
        kernels.done.clear()
        results = zip(family.ours(case, tensors), grads, strict=True)
        outputs, its_grads = zip(*((r, g) for r, g in results if r.requires_grad), strict=True)
        (alone,) = torch.autograd.grad(outputs, leaves[leaf], its_grads)
        torch.testing.assert_close(alone, expected, rtol=2e-2, atol=2e-2)
        assert kernels.done.count("weight_gradient") == ("weight" in leaf and "norm" not in leaf)


SHAPES = {
    # M 8400 and 16400, ragged tiles in both directions, K no multiple of a k block.
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
    # PyTorch's product adds to what reaches the rows besides, and the longer sums over two layers.
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
    """The kernel that makes dz adds what reaches the sum besides: whole blocks, and edges."""
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
