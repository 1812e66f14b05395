"""Residual sums in FP8: which products add them, what that launches, and what comes out.

On a CPU `fp8_kernels` replaces Hopper's kernels, with the same bits, and the pass is told that
products add as they do there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fp8_kernels
import pytest
import torch
import torch.nn.functional as F
from devices import ON_HOPPER
from float8_models import WIDE, K, decibels
from fp8_layers import Layer, layers, rows
from stand_in import EIGHT_BITS
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import fused_norm as fn
from fused_norm.models import fuse
from fused_norm.models.forms import form

BF16 = torch.bfloat16
RECIPES = ("rowwise", "tensorwise", "blockwise")
pytestmark = pytest.mark.usefixtures("narrow_fp8")
# What compiles for seconds.
ONE_FIRST = [RECIPES[0], *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in RECIPES[1:])]


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pass decide for a CPU as it does for Hopper."""
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_fp8", lambda x, recipe: x.dtype is BF16)
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda x, weight: True)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


Counted = tuple[Tensor, list[str], int]


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counted]:
    """Return what compiles and runs a model by kernels: its result, their names, and other sums.

    A kernel that adds a residual has a `+` after its name. Other sums are those of rows that the
    graph leaves to PyTorch.
    """
    told: list[str] = []
    for name in EIGHT_BITS:
        kernel = getattr(fp8_kernels, name)

        def named(call: Any, name: str = name, kernel: Any = kernel) -> None:
            told.append(name + "+" * bool(call.residual))
            kernel(call)

        monkeypatch.setattr(fp8_kernels, name, named)

    def run(model: nn.Module, x: Tensor, recipe: str) -> Counted:
        sums: list[Node] = []

        def kept(module: GraphModule, inputs: Any) -> Any:
            fuse.fuse(module, fuse.Options(fp8=recipe))
            sums.extend(node for node in module.graph.nodes if form(node).kind == "add")
            return module.forward

        torch.compiler.reset()
        compiled = torch.compile(model, backend=kept)
        with fp8_kernels.running(tmp_path), torch.no_grad():
            compiled(x)
            told.clear()
            y = compiled(x)
        return y, [*told], len(sums)

    return run


def compiled(model: nn.Module, recipe: str, **options: Any) -> Callable[[Tensor], Tensor]:
    options = {"then": "eager", "fp8": recipe, **options}
    run: Callable[[Tensor], Tensor] = torch.compile(model, backend="fused_norm", options=options)
    return run


def report(model: nn.Module, x: Tensor, **options: Any) -> dict[str, tuple[str, str]]:
    """Return the kind of each site and what is said of it, by its path."""
    sites = fn.explain(model, x, options={"then": "eager", **options}).sites
    return {s.path: (s.kind, s.implementation if s.fused else s.reason) for s in sites}


@pytest.mark.parametrize("recipe", ONE_FIRST)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.usefixtures("as_on_hopper")
def test_a_whole_block_has_no_pass_for_its_sums(
    gated: bool,
    recipe: str,
    counted: Callable[..., Counted],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    model, x = layers(gated).eval().requires_grad_(False), rows()
    request.addfinalizer(lambda: fn.unfreeze(model))
    fn.freeze(model)
    found, launched, sums = counted(model, x, recipe)
    assert sums == 0
    quantized = ["maxima", "quantize_by_maxima"] if recipe == "tensorwise" else ["quantize"]
    # PyTorch computes the norms of `tensorwise`, and no kernel a gate with scales of blocks.
    norm = [] if recipe == "tensorwise" else ["normalize"]
    hidden = ["linear"] * (2 if gated and recipe == "blockwise" else 1)
    attention = [*norm, "linear", *quantized, "linear+"]
    assert launched == 2 * [*attention, *norm, *hidden, *quantized, "linear+"]
    # Where products add nothing, norms do: the same launches, which read and write more.
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_fp8", lambda x, recipe: False)
    other, before, _ = counted(model, x, recipe)
    assert "linear+" not in before
    # The last norm is followed by a layer in bfloat16.
    assert before.count("normalize+") == (0 if recipe == "tensorwise" else 3)
    assert [name.rstrip("+") for name in launched] == [name.rstrip("+") for name in before]
    assert decibels(found, other) > 30
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    assert decibels(found, exact) > 20
    assert decibels(found, exact) > decibels(other, exact) - 0.1


@pytest.mark.usefixtures("as_on_hopper")
def test_explain_says_which_products_add() -> None:
    model, x = layers(False), rows()
    found = report(model, x, fp8="rowwise")
    assert found["0.out"] == ("residual", "FP8 rowwise")
    by_inductor = fn.explain(model, x, options={"fp8": "rowwise", "small": True})
    assert "residual after" in by_inductor.sites[1].calls[0]
    told = fn.explain(model, x, options={"then": "eager", "fp8": "rowwise"})
    assert "2 sums added by products" in told.summary()
    left = report(model, x, fp8="rowwise", skip=["0.out"])
    assert left["0.out"] == ("residual", "bfloat16: 0.out, skipped by '0.out'")
    assert left["1.out"] == ("residual", "FP8 rowwise")
    # Without FP8, and where no sum is to be rounded with a product.
    assert report(model, x)["0.out"] == ("residual", "kernels")
    assert report(model, x, fp8="rowwise", rounding="model")["0.out"] == ("linear", "FP8 rowwise")


def test_elsewhere_norms_add() -> None:
    model, x = layers(False), rows()
    found = report(model, x, fp8="rowwise")
    assert found["0.out"] == ("linear", "FP8 rowwise")
    norms = fn.explain(model, x, options={"then": "eager", "fp8": "rowwise"}).norms
    # The last layer has few outputs, so its norm may be left.
    assert [["residual" in call for call in site.calls] for site in norms[:4]] == [
        *([False], [True], [True], [True])
    ]


def narrow(features: int) -> nn.Module:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.norm = nn.Linear(K, features), nn.LayerNorm(features)
            self.up = nn.Linear(features, K)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.up(self.norm(self.out(x) + x[..., :features] * 2))
            return y

    torch.manual_seed(0)
    return Narrow().to(BF16)


@pytest.mark.usefixtures("as_on_hopper")
def test_layers_too_narrow_for_fp8_add_in_bfloat16() -> None:
    told = report(narrow(K // 2), rows(), fp8="rowwise")
    assert told["out"] == ("residual", f"bfloat16: out, a size of {K // 2}, below {K}")
    assert report(narrow(K), rows(), fp8="rowwise")["out"] == ("residual", "FP8 rowwise")


def broadcast(model: Layer, x: Tensor) -> Tensor:
    return x[:1] + model.out(x)


def of_another_dtype(model: Layer, x: Tensor) -> Tensor:
    return x.float() + model.out(x)


def scaled_sum(model: Layer, x: Tensor) -> Tensor:
    return torch.add(x, model.out(x), alpha=2)


def read_twice(model: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model.out(x)
    return x + y, y * 2


def written_between(model: Layer, x: Tensor) -> Tensor:
    a = (x * 1.5).detach()
    y = F.linear(a, model.out.weight.detach())
    a.mul_(2)
    return x + y + a * model.norm1.weight


def of_two(model: Layer, x: Tensor) -> Tensor:
    """The first sum is computed after the second layer."""
    later = model.out(x * 0.5)
    x = model.down(model.up(x)) + x
    return x + later


def in_place(model: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    s = x * 2
    s += model.out(x)
    return F.relu(s), s


def read_by_others(model: Layer, x: Tensor) -> tuple[Tensor, ...]:
    s = x + model.out(x)
    return s, model.up(model.norm2(s)), s.mean(-1), s.t() if s.dim() == 2 else s.transpose(0, 1)


Function = Callable[[Layer, Tensor], Any]
CASES: list[tuple[Function, int]] = [
    *((function, 0) for function in (broadcast, of_another_dtype, scaled_sum, read_twice)),
    (written_between, 0),
    *((of_two, 2), (in_place, 1), (read_by_others, 1)),
]


@pytest.mark.parametrize(("function", "count"), CASES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.usefixtures("as_on_hopper")
def test_values_of_sums(function: Function, count: int, trains: bool) -> None:
    """The same values as of the sum that PyTorch adds, and the same gradients."""
    torch.manual_seed(0)
    model, x = Layer(False).to(BF16), rows()

    def wrapped(x: Tensor) -> Any:
        return function(model, x)

    with torch.set_grad_enabled(trains):
        options = {"then": "eager", "fp8": "rowwise"}
        sites = fn.explain(wrapped, x.clone(), options=options).sites
        assert sum(site.kind == "residual" for site in sites) == count
        torch.compiler.reset()
        found = torch.compile(wrapped, backend="fused_norm", options=options)(x.clone())
        exact = function(model, x.clone())
        found, exact = ([v] if isinstance(v, Tensor) else v for v in (found, exact))
        for a, e in zip(found, exact, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())
            assert decibels(a.detach(), e.detach()) > 25
        if trains:
            parameters = list(model.parameters())
            gradients = [
                torch.autograd.grad(
                    sum(v.float().square().sum() for v in ys), parameters, allow_unused=True
                )
                for ys in (found, exact)
            ]
            for a, e in zip(*gradients, strict=True):
                assert (a is None) == (e is None)
                assert a is None or decibels(a, e) > 20


@pytest.mark.parametrize(
    "recipe", [*ONE_FIRST, pytest.param("rowwise_with_gw_hp", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("as_on_hopper")
def test_training_adds_in_products_too(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(True), rows()
    assert report(model, x, fp8=recipe)["0.out"] == ("residual", f"FP8 {recipe}")

    def step(run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.float().square().sum().backward()
        assert leaf.grad is not None
        return {"y": y.detach(), "x": leaf.grad} | {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }

    found = step(compiled(model, recipe, then="aot_eager"))
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_fp8", lambda x, recipe: False)
    torch.compiler.reset()
    other, exact = step(compiled(model, recipe, then="aot_eager")), step(model)
    assert set(found) == set(exact)
    for name, e in exact.items():
        assert decibels(found[name], e) > 15, name
        assert decibels(found[name], e) > decibels(other[name], e) - 0.5, name


def test_a_mode_decides_nothing_when_a_graph_runs() -> None:
    """Layers that are skipped stay in bfloat16 where `autocast_fp8` is active as well."""
    model, x = layers(True).requires_grad_(False), rows()
    for then in ("eager", "aot_eager"):
        for options in ({"fp8": None}, {"fp8": "rowwise", "skip": ["*"]}, {"skip": ["*"]}):
            torch.compiler.reset()
            plain = torch.compile(model, backend="fused_norm", options={"then": then})(x)
            torch.compiler.reset()
            options = {"then": then, **options}
            with fn.autocast_fp8("rowwise"):
                run = torch.compile(model, backend="fused_norm", options=options)
                assert torch.equal(run(x), plain)
                assert torch.equal(run(x), plain)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("then", ["eager", "inductor"])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_on_hopper(gated: bool, then: str, recipe: str) -> None:
    """Products add the sums between layers, and values and gradients are close."""
    from launches import names

    model, x = layers(gated, WIDE).cuda(), rows(WIDE).repeat(8, 4, 1).cuda()
    exact_model = layers(gated, WIDE).double().cuda()
    for trains in (False, True):
        with torch.set_grad_enabled(trains):
            torch.compiler.reset()
            options = {"then": then, "fp8": recipe, "small": True}
            sites = {s.path: s for s in fn.explain(model, x, options=options).sites}
            assert sites["0.out"].kind == sites["1.out"].kind == "residual"
            assert sites["0.out"].implementation == f"FP8 {recipe}"
            run = torch.compile(model, backend="fused_norm", options=options)
            run(x)
            launched = names(lambda run=run: run(x))
            assert "scaled_add" in launched, launched
            y = run(x)
            with torch.no_grad():
                exact = exact_model(x.double())
            assert decibels(y.detach(), exact) > 20
            if trains:
                y.float().square().sum().backward()
                z = exact_model(x.double())
                z.square().sum().backward()
                for (name, p), e in zip(
                    model.named_parameters(), exact_model.parameters(), strict=True
                ):
                    assert decibels(p.grad, e.grad) > 15, name
