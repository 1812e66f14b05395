"""Hidden columns of a gate in FP8 that get powers of two, so that one scale serves all rows."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import (
    BF16,
    NORMS,
    M,
    adversarial,
    assert_clean_but_for,
    frozen,
    hidden_of,
    matrix,
    tailed,
)
from fp8_columns import (
    LOST,
    K,
    N,
    assert_as_precise,
    exact,
    folds,
    gated,
    large,
    made_of,
    spread,
    tails,
    without_columns,
)
from fp8_kernels import running
from fp8_products import LEAST, decibels
from torch import Tensor, nn
from torch.testing._internal.optests import opcheck
from torch.utils.flop_counter import FlopCounterMode

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import GATES
from fused_norm.freeze import freeze_parameters
from fused_norm.recipes import E4M3, Cast

OPS = torch.ops.fused_norm
RECIPES = ["rowwise", "tensorwise", "rowwise_with_gw_hp"]
KINDS = [
    spread(0.7),
    spread(1),
    large(1, 20),
    large(20, 1),
    large(1, 30, 64),
    large(5, 5, 20),
    tails,
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("change", KINDS)
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("is_tailed", [False, True])
def test_precision(normalization: str, change: Any, is_tailed: bool) -> None:
    mlp = fn.freeze(gated(normalization, change, size=(1024, 2816)))
    # Of fewer rows, a few large ones would decide.
    assert_as_precise(mlp, tailed(1000, 1024) if is_tailed else matrix(1000, 1024))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", GATES.values())
@pytest.mark.parametrize("has_bias", [False, True])
def test_recipes_and_activations(recipe: str, activation: str, has_bias: bool) -> None:
    def change(mlp: fn.LayerNormMLP) -> None:
        spread(0.8)(mlp)
        if mlp.fc1_bias is not None:
            # As large as what they are added to.
            mlp.fc1_bias.copy_(mlp.fc1_weight.float().norm(dim=1) * mlp.fc1_bias.normal_().sign())

    mlp = fn.freeze(gated("LayerNorm", change, activation=activation, recipe=recipe, bias=has_bias))
    x = matrix(2, 70, K)
    assert_as_precise(mlp, x)
    assert_as_precise(mlp, x, residual_out=x)


@pytest.mark.parametrize("change", [spread(0.7), large(1, 30, 64), large(5, 5, 20)])
@pytest.mark.parametrize("normalization", NORMS)
def test_no_row_exceeds_the_bound(normalization: str, change: Any) -> None:
    """Each column's bound fits: rows that try one come near what its own power of two holds."""
    mlp = fn.freeze(gated(normalization, change, size=(1024, 384), activation="reglu"))
    x = adversarial(mlp, 768)
    with folds() as used:
        found = hidden_of(mlp, x)
    assert found.isfinite().all()
    (scale,) = used
    assert scale is not None
    largest = found.abs().amax(0) / (448 * scale)
    assert largest.max() <= 1
    # A mean is subtracted, and a scale is rounded up to a power of two.
    assert 0.2 < largest.median() < largest.max() < 3 * largest.median()


def test_rows_that_are_no_numbers() -> None:
    for normalization in NORMS:
        mlp, x = fn.freeze(gated(normalization)), matrix(M, K)
        clean = mlp(x)
        x[3, 5], x[120, 7] = torch.nan, torch.inf
        assert_clean_but_for(mlp(x), clean, [3, 120])


def closed(mlp: fn.LayerNormMLP) -> None:
    """A column that its bound takes for large, and that is always 0."""
    spread(0.8)(mlp)
    mlp.fc1_weight[7], mlp.fc1_weight[N + 7] = 0, 0
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[7], mlp.fc1_bias[N + 7] = -1e5, 1e5


def infinite_out(mlp: fn.LayerNormMLP) -> None:
    spread(0.8)(mlp)
    mlp.fc2_weight[3, 4] = torch.inf


def not_a_number(mlp: fn.LayerNormMLP) -> None:
    spread(0.8)(mlp)
    mlp.fc1_weight[3, 4] = torch.nan


def not_a_bias(mlp: fn.LayerNormMLP) -> None:
    spread(0.8)(mlp)
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[-1] = torch.nan


def of_8_bits(mlp: fn.LayerNormMLP) -> None:
    """A second weight that loses nothing as it is."""
    spread(0.8)(mlp)
    q, _ = recipes.quantize(mlp.fc2_weight, Cast(E4M3, "row"), True)
    mlp.fc2_weight.copy_(q.float() / 448)
    mlp.fc2_weight[:, 0] = 1


OF_NO_USE = [large(1, 100), large(100, 100), large(1, 2.0**16, 64), closed, infinite_out]
OF_NO_USE += [not_a_number, not_a_bias, of_8_bits]


@pytest.mark.parametrize("change", OF_NO_USE)
def test_columns_that_are_of_no_use(change: Any) -> None:
    """Rows or the second weight would lose too much: each row has its own scale, as usual."""
    mlp, x = fn.freeze(gated("LayerNorm", change)), matrix(M, K)
    with folds() as used:
        found = [mlp(x) for _ in range(2)]
    assert used == [None, None]
    fn.unfreeze(mlp)
    for each in found:
        torch.testing.assert_close(mlp(x), each, rtol=0, atol=0, equal_nan=True)


def test_where_one_scale_serves_nothing_has_factors() -> None:
    for activation, count in itertools.product(("swiglu", "gelu"), (M, 20)):
        mlp = frozen(activation=activation, size=(K, N))
        with folds() as used:
            mlp(matrix(count, K))
        assert not any(used)
        assert made_of(mlp.fc2_weight) == ["fp8"]


def test_zero_columns() -> None:
    """Of nothing, any scale is exact."""

    def change(mlp: fn.LayerNormMLP) -> None:
        spread(0.8)(mlp)
        mlp.fc1_weight[::5] = 0
        assert mlp.fc1_bias is not None
        mlp.fc1_bias.zero_()

    mlp = fn.freeze(gated(change=change))
    assert_as_precise(mlp, matrix(M, K))


def test_types() -> None:
    """Powers of two are exact in all of them, unless a type has too few exponents."""
    for dtype in (torch.float16, torch.float32):
        mlp, x = fn.freeze(gated(bias=False, dtype=dtype)), matrix(M, K).to(dtype)
        assert_as_precise(mlp, x)
    mlp = gated(dtype=torch.float16)
    assert mlp.fc1_bias is not None
    # Less than the least number of full precision, once they are divided.
    mlp.fc1_bias.copy_(mlp.fc1_bias.sign() * (2.0**-14 + 2.0**-24))
    with folds() as used:
        fn.freeze(mlp)(x.half())
    # What would be hidden exceeds the type.
    mlp = gated(bias=False, dtype=torch.float16)
    mlp.layer_norm_weight *= 64
    with folds() as more:
        fn.freeze(mlp)(x.half())
    assert used == more == [None]


def test_few_rows_use_the_same_weights() -> None:
    """So only one version of the second is kept; each row then has its own scale."""
    mlp, x = gated(), matrix(M, K)
    unfrozen = mlp(x[:20])
    fn.freeze(mlp)
    for rows in (x[:20], x, x[:1]):
        with folds() as used:
            found = mlp(rows)
        assert (used[0] or 0) > 0 or len(rows) < 129
        assert used[0] is not None
    assert made_of(mlp.fc2_weight) == ["fp8 in columns"]
    found = mlp(x[:20])
    assert not torch.equal(found, unfrozen)
    truth = exact(mlp, x[:20])
    assert decibels(found, truth) > decibels(unfrozen, truth) - LOST


def test_calls_without_factors() -> None:
    """Not frozen, frozen for a context or not together, few or many rows, other recipes."""
    mlp, x = gated(), matrix(M, K)
    expected = mlp(x)
    with folds() as used:
        mlp(x)
        with fn.frozen_parameters(mlp):
            assert all(torch.equal(mlp(x), expected) for _ in range(3))
        for parameter in mlp.parameters():
            others = [p for p in mlp.parameters() if p is not parameter]
            if parameter is mlp.fc2_bias:
                continue
            record = freeze_parameters(others)
            assert torch.equal(mlp(x), expected)
            record.thaw()
        fn.freeze(gated(recipe="blockwise"))(x)
        assert not any(used)
        used.clear()
        record = freeze_parameters(p for p in mlp.parameters() if p is not mlp.fc2_bias)
        assert not torch.equal(mlp(x), expected)
        assert all(used)
        record.thaw()
        assert torch.equal(mlp(x), expected)


NAMES = ["layer_norm_weight", "layer_norm_bias", "fc1_bias", "fc1_weight", "fc2_weight"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["unfreeze", "train", "load", "data", "again"])
@pytest.mark.parametrize("offload", [False, True])
def test_nothing_is_stale(name: str, way: str, offload: bool) -> None:
    """Whatever ends freezing ends what was made, and new memory has none of it."""
    mlp, x = fn.freeze(gated("LayerNorm"), offload=offload), matrix(M, K)
    original = copy.deepcopy(gated("LayerNorm")).state_dict()
    before = mlp(x)
    values = original[name].roll(1, 0) * 4
    if way == "unfreeze":
        fn.unfreeze(mlp)
        getattr(mlp, name).copy_(values)
    elif way == "train":
        mlp.train().eval()
        getattr(mlp, name).copy_(values)
    elif way == "load":
        mlp.load_state_dict({**original, name: values})
    elif way == "data":
        getattr(mlp, name).data = values
        if not offload:
            other = gated("LayerNorm")
            getattr(other, name).copy_(values)
            assert torch.equal(mlp(x), other(x))
    else:
        fn.freeze(mlp)
        getattr(mlp, name).copy_(values)
    fn.freeze(mlp, offload=offload)
    with folds() as used:
        found = mlp(x)
    assert used[0]
    assert not torch.equal(found, before)
    other = gated("LayerNorm")
    getattr(other, name).copy_(values)
    assert torch.equal(fn.freeze(other)(x), found)


def test_weights_that_are_quantized_again() -> None:
    """Factors belong to the weights in 8 bits that they are of, which another record may keep."""
    mlp, x = gated("LayerNorm"), matrix(M, K)
    expected = fn.freeze(mlp)(x)
    fn.unfreeze(mlp)
    of_weight = freeze_parameters([mlp.fc1_weight])
    of_all = freeze_parameters(mlp.parameters())
    with folds() as used:
        assert torch.equal(mlp(x), expected)
        # A write that goes unnoticed.
        mlp.fc1_weight.mul_(64)
        assert torch.equal(mlp(x), expected)
        of_weight.thaw()
        found = mlp(x)
    assert used[1] == used[0]
    assert used[2] is not None
    assert used[2] > used[0]  # type: ignore[operator]
    of_all.thaw()
    assert torch.equal(fn.freeze(mlp)(x), found)


def test_a_second_weight_of_several_layers() -> None:
    """Each multiplies by its own version: with these factors, others, or none."""
    x, z = matrix(M, K), matrix(M, N, seed=1)
    first, second = gated(), gated(change=spread(0.9))
    second.fc2_weight = first.fc2_weight
    for mlp in (first, second):
        for name in ("fc1_weight", "fc1_bias"):
            getattr(mlp, name).requires_grad_(False)
    plain = fn.linear_add(z, first.fc2_weight, None, x, recipe="rowwise")[0]
    alone = [fn.freeze(copy.deepcopy(mlp))(x) for mlp in (first, second)]
    assert not torch.equal(*alone)
    both = nn.ModuleList([first, second]).eval()
    for offload in (False, True):
        fn.freeze(both, offload=offload)
        for _ in range(2):
            found = [mlp(x) for mlp in both]
            other, _ = fn.linear_add(z, first.fc2_weight, None, x, recipe="rowwise")
            assert torch.equal(other, plain)
            if not offload:
                assert all(map(torch.equal, found, alone))
        # Otherwise it is shared, and nothing is kept.
        kept = [] if offload else ["fp8", "fp8 in columns", "fp8 in columns"]
        assert made_of(first.fc2_weight) == kept
        fn.unfreeze(both)


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_offloaded(activation: str) -> None:
    """The second weight leaves for the version that is used, which is the only one."""
    x, mlp = matrix(M, K), gated("LayerNorm", activation=activation)
    state = copy.deepcopy(mlp.state_dict())
    expected = fn.freeze(copy.deepcopy(mlp))(x)
    fn.freeze(mlp, offload=True)
    with folds() as used:
        assert all(torch.equal(mlp(rows), expected[: len(rows)]) for rows in (x, x))
        few = mlp(x[:20])
    assert len(set(used)) == 2
    assert mlp.fc2_weight.isnan().all()
    assert made_of(mlp.fc2_weight) == ["fp8 in columns"]
    again = copy.deepcopy(mlp)
    assert not torch.equal(mlp(x), expected)
    for other in (mlp, again):
        assert all(torch.equal(v, state[name]) for name, v in other.state_dict().items())
        assert torch.equal(fn.freeze(other, offload=True)(x[:20]), few)
        assert torch.equal(other(x), expected)


def test_offloaded_once_it_was_used_without_factors() -> None:
    """What has been made of the second weight is all that is left of it on the device."""
    x, mlp = matrix(M, K), gated()
    expected = mlp(x)
    fn.freeze(mlp, offload=True)
    assert torch.equal(without_columns(mlp, x), expected)
    with folds() as used:
        assert all(torch.equal(mlp(x), expected) for _ in range(2))
    assert used == [None, None]


def test_offloaded_and_used_without_factors() -> None:
    """As under autocast: the second weight's values come from the host, for each call."""
    x, mlp = matrix(M, K), gated()
    with torch.autocast("cpu", BF16):
        expected = fn.freeze(mlp)(x)
    fn.freeze(mlp, offload=True)
    found = mlp(x)
    for _ in range(2):
        with torch.autocast("cpu", BF16):
            assert torch.equal(mlp(x), expected)
        assert torch.equal(mlp(x), found)
        assert made_of(mlp.fc2_weight) == ["fp8 in columns"]
        assert mlp.fc2_weight.isnan().all()
    assert not torch.equal(found, expected)


def test_threads_that_share_an_offloaded_model() -> None:
    """None reads the placeholder of a weight that another has just moved."""
    mlp, x = gated(), matrix(M, K)
    expected = fn.freeze(mlp)(x)
    threads, interval = 4, sys.getswitchinterval()
    start = threading.Barrier(threads)

    def run(_: int) -> Tensor:
        start.wait()
        with torch.no_grad():
            return mlp(x)

    try:
        # As if each instruction of Python were another thread's turn.
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(10):
                fn.freeze(mlp, offload=True)
                assert all(torch.equal(y, expected) for y in pool.map(run, range(threads)))
    finally:
        sys.setswitchinterval(interval)


def test_state_and_copies() -> None:
    """Parameters keep their values; a copy is not frozen."""
    mlp, x = gated("LayerNorm"), matrix(M, K)
    state, unfrozen = copy.deepcopy(mlp.state_dict()), mlp(x)
    found = fn.freeze(mlp)(x)
    assert all(torch.equal(v, state[name]) for name, v in mlp.state_dict().items())
    assert torch.equal(copy.deepcopy(mlp)(x), unfrozen)
    assert torch.equal(fn.freeze(copy.deepcopy(mlp))(x), found)
    assert torch.equal(mlp(x), found)
    assert torch.equal(fn.unfreeze(mlp)(x), unfrozen)


@pytest.mark.parametrize("activation", GATES.values())
def test_a_gate_of_two_layers(activation: str) -> None:
    """It has the bits of one layer with both, and the weights of its own."""
    mlp, x = fn.freeze(gated("LayerNorm", activation=activation)), matrix(M, K)
    assert mlp.fc1_bias is not None
    weights, biases = ([v.clone() for v in w.chunk(2)] for w in (mlp.fc1_weight, mlp.fc1_bias))
    how: dict[str, Any] = {"normalization": "layer_norm", "recipe": "rowwise", "eps": mlp.eps}
    how |= {"norm_weight": mlp.layer_norm_weight, "norm_bias": mlp.layer_norm_bias}
    record = freeze_parameters([*mlp.parameters(), *weights, *biases])
    with folds() as used:
        second = (mlp.fc2_weight, mlp.fc2_bias)
        found = fn.norm_mlp(x, weights, biases, *second, activation=activation, **how)
        assert torch.equal(found, mlp(x))
    assert used[0] == used[1] is not None
    record.thaw()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("residual", [False, True])
def test_kernels(recipe: str, residual: bool, tmp_path: Path) -> None:
    """They take a scale for each column of any recipe, and nothing passes over hidden rows."""
    mlp, x = gated("LayerNorm", recipe=recipe), matrix(2, 70, K)
    more = {"residual_out": x} if residual else {}
    expected = fn.freeze(mlp)(x, **more)
    fn.freeze(mlp)
    with running(tmp_path) as names, folds() as used:
        mlp(x, **more)
        names.clear()
        found = mlp(x, **more)
    assert all(used)
    # With one scale, PyTorch's norm comes first.
    assert [n for n, _ in names] == ["normalize"] * (recipe != "tensorwise") + ["linear", "linear"]
    assert decibels(found, expected) > 40


@pytest.mark.parametrize("rows", [130, 20])
def test_compiled(rows: int) -> None:
    """A graph asks when it runs, so that it does what calls do, frozen or not."""
    mlp, x = gated(), matrix(rows, K)
    unfrozen = mlp(x)
    expected = fn.freeze(mlp)(x)
    assert not torch.equal(expected, unfrozen)
    for backend in ("aot_eager", "fused_norm"):
        torch.compiler.reset()
        compiled: Any = torch.compile(mlp, backend=backend, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(x), expected)
            fn.unfreeze(mlp)
            assert torch.equal(compiled(x), unfrozen)
            fn.freeze(mlp)


class GatedBlock(nn.Module):
    """An MLP as in LLaMA, with biases or without."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(1024)
        self.gate_proj = nn.Linear(1024, 1152, bias=bias)
        self.up_proj = nn.Linear(1024, 1152, bias=bias)
        self.down_proj = nn.Linear(1152, 1024, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        a = nn.functional.silu(self.gate_proj(z)) * self.up_proj(z)
        y: Tensor = x + self.down_proj(a)
        return y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fp8", RECIPES)
def test_frozen_by_the_backend(bias: bool, fp8: str) -> None:
    torch.manual_seed(0)
    model, x = GatedBlock(bias).to(BF16).eval(), matrix(130, 1024)
    for layer in (model.gate_proj, model.up_proj):
        layer.weight *= torch.randn(1152, 1).mul(0.8).exp()
    torch.compiler.reset()
    compiled: Any = torch.compile(
        model, backend="fused_norm", options={"fp8": fp8, "freeze": True}, dynamic=False
    )
    with folds() as used:
        found = [compiled(x) for _ in range(2)]
    assert len(used) == 2
    assert all(used)
    assert torch.equal(*found)
    truth = copy.deepcopy(model).double()(x.double()) - x
    assert decibels(found[0].double() - x, truth) > 22
    kept = made_of(model.down_proj.weight)
    assert kept == ["fp8 in columns"]
    assert decibels(found[0], fn.unfreeze(model)(x)) > LEAST


def test_registration() -> None:
    """Its op, which a graph has, by itself; empty rows; the operations that it counts."""
    mlp, x = gated("LayerNorm"), matrix(M, K)
    assert mlp.fc1_bias is not None
    q, scale = recipes.quantize(x, Cast(E4M3, "row"), False)
    pairs = [v.chunk(2) for v in (mlp.fc1_weight, mlp.fc1_bias)]
    for weights, biases in (([mlp.fc1_weight], [mlp.fc1_bias]), pairs):
        given: list[Any] = [q, scale, [*weights], [*biases], "row", "row", False, "swiglu", BF16]
        given += [mlp.fc2_weight, mlp.fc2_bias, x, mlp.layer_norm_weight, None, 0.0]
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        opcheck(OPS.fp8_gated_mlp.default, tuple(given), test_utils=checks)
        with FlopCounterMode(display=False) as counter:
            OPS.fp8_gated_mlp(*given)
        assert counter.get_total_flops() == 2 * M * K * 3 * N
        given[0], given[1], given[11] = q[:0], scale[:0], x[:0]
        assert OPS.fp8_gated_mlp(*given).shape == (0, K)
