"""An MLP's hidden rows that stay in FP8 by one scale, which a bound of frozen parameters gives."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_kernels import running
from fp8_products import LEAST, SHORT, decibels
from torch import Tensor
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import PLAIN
from fused_norm.ops import hidden_scale, scaled_hidden
from fused_norm.recipes import E4M3, Cast

BF16 = torch.bfloat16
OPS = torch.ops.fused_norm
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
NORMS = ("RMSNorm", "LayerNorm")
K, N, M = 256, 384, 140


def matrix(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape).to(BF16)


def layer(
    normalization: str = "RMSNorm",
    activation: str = "gelu",
    change: Callable[[fn.LayerNormMLP], None] | None = None,
    recipe: str = "rowwise",
    size: tuple[int, int] = (K, N),
    **options: Any,
) -> fn.LayerNormMLP:
    torch.manual_seed(3)
    how: dict[str, Any] = {"activation": activation, "recipe": recipe, "dtype": BF16, **options}
    mlp = fn.LayerNormMLP(*size, normalization=normalization, **how).eval().requires_grad_(False)
    with torch.no_grad():
        mlp.layer_norm_weight.uniform_(0.5, 1.5)
        if mlp.layer_norm_bias is not None:
            mlp.layer_norm_bias.normal_()
        if change is not None:
            change(mlp)
    return mlp


def outliers_of_gamma(mlp: fn.LayerNormMLP) -> None:
    mlp.layer_norm_weight[::50] *= 1000


def huge_bias(mlp: fn.LayerNormMLP) -> None:
    assert mlp.fc1_bias is not None
    mlp.fc1_bias.normal_(std=100)


def huge_beta(mlp: fn.LayerNormMLP) -> None:
    if mlp.layer_norm_bias is not None:
        mlp.layer_norm_bias *= 100


def heavy_tails(mlp: fn.LayerNormMLP) -> None:
    """A weight of Student's t with three degrees of freedom, and rows of different sizes."""
    torch.manual_seed(4)
    t = torch.distributions.StudentT(3.0).sample(mlp.fc1_weight.shape)
    sizes = torch.randn(len(t), 1).mul(0.5).exp()
    mlp.fc1_weight.copy_(t * sizes / t.shape[1] ** 0.5)


CHANGES = [None, outliers_of_gamma, huge_bias, huge_beta, heavy_tails]


@contextmanager
def scales(fewest: int = hidden_scale.FEWEST_ROWS) -> Iterator[list[float]]:
    """Give the scales that hidden rows get here: 0.0 where each finds its own.

    Args:
        fewest: Fewest rows that get one.
    """
    found: list[float] = []

    def noting(*given: Any) -> float:
        found.append(hidden_scale.hidden_scale(*given))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_scale, "FEWEST_ROWS", fewest)
        patch.setattr(scaled_hidden, "hidden_scale", noting)
        yield found


def by_rows(mlp: fn.LayerNormMLP, x: Tensor, **more: Tensor) -> Tensor:
    """Return a result whose hidden rows find a scale each."""
    with scales(fewest=1 << 40):
        return mlp(x, **more)


def adversarial(mlp: fn.LayerNormMLP, rows: int = M) -> Tensor:
    """Return rows whose norm is along some row of the first weight each, times gamma, both ways."""
    w = (mlp.fc1_weight.float() * mlp.layer_norm_weight.float())[torch.arange(rows) % N]
    sign = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).to(w.device)
    return (w * sign[:, None] / w.norm(dim=1, keepdim=True) * 16).to(BF16)


def tailed(rows: int = M, features: int = K) -> Tensor:
    """Return rows of different sizes with a few features that are far larger than the others."""
    torch.manual_seed(5)
    x = torch.randn(rows, features) * torch.randn(rows, 1).exp()
    x[:, ::61] *= 50
    return x.to(BF16)


def hidden_of(mlp: fn.LayerNormMLP, x: Tensor) -> Tensor:
    """Return hidden rows as they are in 8 bits, widened."""
    found: list[Tensor] = []
    original = scaled_hidden._hidden_op

    def noting(*given: Any) -> list[Tensor]:
        q, scale = original(*given)
        found.append(recipes.dequantize(q, scale, "row", torch.float64))
        return [q, scale]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_hidden, "_hidden_op", noting)
        mlp(x)
    return found[0]


def exact_hidden(mlp: fn.LayerNormMLP, x: Tensor) -> Tensor:
    beta = mlp.layer_norm_bias
    z = fn.norm_linear(
        x.double(),
        torch.eye(x.shape[-1], dtype=torch.float64, device=x.device),
        normalization="layer_norm" if beta is not None else "rms_norm",
        norm_weight=mlp.layer_norm_weight.double(),
        norm_bias=None if beta is None else beta.double(),
        eps=mlp.eps,
    )
    bias = None if mlp.fc1_bias is None else mlp.fc1_bias.double()
    h = torch.nn.functional.linear(z, mlp.fc1_weight.double(), bias)
    return PLAIN[mlp.activation].function(h)


def frozen(*given: Any, **options: Any) -> fn.LayerNormMLP:
    return fn.freeze(layer(*given, **options))


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_no_row_exceeds_the_bound(
    normalization: str, activation: str, change: Any, no_grad: None
) -> None:
    """Rows that are as bad as can be stay numbers, and come near what the scale leaves room for."""
    mlp = frozen(normalization, activation, change)
    x = adversarial(mlp)
    with scales() as used:
        found = hidden_of(mlp, x)
    assert used[0] > 0
    assert found.isfinite().all()
    largest = float(found.abs().max()) / (448 * used[0])
    # A scale is rounded up to a power of two; a mean is subtracted, and shifts are not aligned.
    assert 0.2 < largest <= 1
    assert mlp(x).isfinite().all()


@pytest.mark.parametrize("change", [None, heavy_tails])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("is_tailed", [False, True])
def test_precision(
    normalization: str, activation: str, change: Any, is_tailed: bool, no_grad: None
) -> None:
    """Hidden rows and results are as near to exact ones as where each row finds its scale."""
    mlp = frozen(normalization, activation, change)
    x = tailed() if is_tailed else matrix(M, K)
    truth = exact_hidden(mlp, x)
    with scales() as used:
        ours, y = hidden_of(mlp, x), mlp(x)
    assert all(used)
    with scales(fewest=1 << 40):
        theirs, other = hidden_of(mlp, x), mlp(x)
    wide = copy.deepcopy(mlp).double()
    wide.recipe = None
    exact = wide(x.double())
    for found, least, true in ((ours, theirs, truth), (y, other, exact)):
        assert decibels(found, true) > decibels(least, true) - SHORT
        # No row is worse than others.
        noise, size = ((v - true).norm(dim=1) / true.norm(dim=1) for v in (found, least))
        assert noise.max() < 1.3 * size.max()
    assert decibels(ours, truth) > LEAST


def outlier(mlp: fn.LayerNormMLP) -> None:
    mlp.fc1_weight[7] *= 1000


def pruned(mlp: fn.LayerNormMLP) -> None:
    mlp.fc1_weight[: N // 2 + 1] = 0


def infinite(mlp: fn.LayerNormMLP) -> None:
    mlp.fc1_weight[3, 4] = torch.inf


def not_a_number(mlp: fn.LayerNormMLP) -> None:
    mlp.layer_norm_weight[5] = torch.nan


def far_bias(mlp: fn.LayerNormMLP) -> None:
    assert mlp.fc1_bias is not None
    mlp.fc1_bias[9] = 1e5


@pytest.mark.parametrize("change", [outlier, pruned, infinite, not_a_number, far_bias])
def test_bounds_that_are_of_no_use(change: Any, no_grad: None) -> None:
    """What is typical would have too few bits: each row finds its scale, as ever."""
    mlp, x = frozen(change=change), matrix(M, K)
    with scales() as used:
        found = mlp(x)
    assert used == [0.0]
    fn.unfreeze(mlp)
    torch.testing.assert_close(mlp(x), found, rtol=0, atol=0, equal_nan=True)


def test_calls_without_a_bound(no_grad: None) -> None:
    """Not frozen, frozen for a context, of few rows, gates, modulated, no MLP, other recipes."""
    x = matrix(M, K)
    with scales() as used:
        mlp = layer()
        expected = mlp(x)
        with fn.frozen_parameters(mlp):
            assert all(torch.equal(mlp(x), expected) for _ in range(3))
        assert not any(used)
        fn.freeze(mlp)
        assert torch.equal(mlp(x[:128]), expected[:128])
        assert not any(used)
        used.clear()
        frozen(activation="swiglu")(x)
        frozen(recipe="blockwise")(x)
        mlp.activation, mlp.eps = "gelu", -1e-9
        mlp(x)
        norm = frozen()
        weights = (norm.fc1_weight, norm.fc1_bias)
        how: dict[str, Any] = {"normalization": "rms_norm", "recipe": "rowwise"}
        fn.norm_linear(x, *weights, **how, activation="gelu", norm_weight=norm.layer_norm_weight)
        assert not used
        mlp.eps = 1e-5
        assert not torch.equal(mlp(x), expected)
        assert all(used)


@pytest.mark.parametrize("name", ["layer_norm_weight", "layer_norm_bias", "fc1_bias", "fc1_weight"])
@pytest.mark.parametrize("way", ["unfreeze", "train", "load", "data", "again"])
def test_no_bound_is_stale(name: str, way: str, no_grad: None) -> None:
    """Whatever ends freezing ends the bound with it, and new memory has none."""
    mlp, x = frozen("LayerNorm"), matrix(M, K)
    with scales() as used:
        mlp(x)
        before = used[-1]
        values = getattr(mlp, name) * 64
        if way == "unfreeze":
            fn.unfreeze(mlp)
            getattr(mlp, name).copy_(values)
        elif way == "train":
            mlp.train().eval()
            getattr(mlp, name).copy_(values)
        elif way == "load":
            mlp.load_state_dict({**mlp.state_dict(), name: values})
        elif way == "data":
            getattr(mlp, name).data = values
        else:
            getattr(mlp, name).copy_(values)
        if way in ("data", "unfreeze", "train", "load"):
            # Not all of them are frozen.
            mlp(x)
            assert not used[1:] or used[-1] == 0
        fn.freeze(mlp)
        found = mlp(x)
        assert used[-1] != before
    other = layer("LayerNorm")
    getattr(other, name).copy_(values)
    assert torch.equal(fn.freeze(other)(x), found)


def test_other_records_of_the_same_parameters(no_grad: None) -> None:
    """A bound belongs to what froze all parameters and to the weight in 8 bits that it is of."""
    mlp, x = layer("LayerNorm"), matrix(M, K)
    from fused_norm.freeze import freeze_parameters

    of_weight = freeze_parameters([mlp.fc1_weight])
    with scales() as used:
        mlp(x)
        of_all = freeze_parameters(mlp.parameters())
        mlp(x)
        assert used[0] == 0
        assert used[1] > 0
        of_all.thaw()
        mlp(x)
        assert used[2] == 0
        mlp.layer_norm_weight.mul_(64)
        again = freeze_parameters(mlp.parameters())
        mlp(x)
        assert used[3] > used[1]
        of_weight.thaw()
        mlp(x)
        assert used[4] == used[3]
        again.thaw()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("residual", [False, True])
def test_mlp(
    recipe: str, normalization: str, residual: bool, tmp_path: Path, no_grad: None
) -> None:
    """The first product stores hidden rows, and nothing passes over them."""
    mlp, x = layer(normalization, recipe=recipe), matrix(2, 70, K)
    more = {"residual_out": x} if residual else {}
    fn.freeze(mlp)
    expected = mlp(x, **more)
    assert not torch.equal(expected, by_rows(mlp, x, **more))
    fn.freeze(mlp)
    with running(tmp_path) as names:
        found = [mlp(x, **more) for _ in range(2)]
        assert torch.equal(*found)
        names.clear()
        mlp(x, **more)
    ran = [name for name, _ in names]
    # With one scale, PyTorch's norm comes first.
    assert ran == ["normalize"] * (recipe != "tensorwise") + ["linear", "linear"]
    assert decibels(found[0], expected) > 40


@pytest.mark.parametrize("activation", PLAIN)
def test_chain(activation: str, tmp_path: Path) -> None:
    """The record of the product that quantizes, with the results of PyTorch's ops."""
    for has_bias, scaling in itertools.product((False, True), ("row", "tensor")):
        given = operands(M, 144, 272, activation, has_bias, scaling)
        expected = OPS.fp8_hidden_by_python(*given)
        with running(tmp_path) as names:
            assert same(OPS.fp8_hidden(*given), expected)
            opcheck(OPS.fp8_hidden.default, tuple(given), test_utils=OF_8_BITS)
        assert {name for name, _ in names} == {"linear"}
    # A bias in another dtype is for PyTorch's ops.
    given[7] = given[7].float()
    with running(tmp_path) as names:
        assert same(OPS.fp8_hidden(*given), OPS.fp8_hidden_by_python(*given))
    assert not names


def test_offloaded(no_grad: None) -> None:
    x = matrix(M, K)
    expected = frozen()(x)
    mlp = fn.freeze(layer(), offload=True)
    with scales() as used:
        assert all(torch.equal(mlp(x), expected) for _ in range(3))
    assert used[0] > 0
    assert len(set(used)) == 1


def test_compiled(no_grad: None) -> None:
    """A graph asks for the bound when it runs, so that it does what calls do."""
    for M in (130, 20):
        mlp, x = frozen(), matrix(M, K)
        expected = mlp(x)
        for backend in ("aot_eager", "fused_norm"):
            torch.compiler.reset()
            compiled = torch.compile(mlp, backend=backend, fullgraph=True)
            assert torch.equal(compiled(x), expected)
        fn.unfreeze(mlp)
        torch.compiler.reset()
        by_rows = mlp(x)
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), by_rows)


def test_weights_that_were_quantized_elsewhere(no_grad: None) -> None:
    """Their numbers are promised to be those of the library that made them."""
    mlp, x = frozen(), matrix(M, K)
    q, scale = recipes.quantize(mlp.fc1_weight, Cast(E4M3, "row"), False)
    made = fn.ops.quantized.scaled_weight(q, scale, "rowwise", BF16)
    how: dict[str, Any] = {"normalization": "rms_norm", "recipe": "rowwise", "activation": "gelu"}
    how["norm_weight"] = mlp.layer_norm_weight
    with scales() as used:
        found = fn.norm_mlp(x, made, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias, **how)
    assert not used
    fn.unfreeze(mlp)
    assert torch.equal(found, mlp(x))


def test_rows_that_are_no_numbers(no_grad: None) -> None:
    for normalization in NORMS:
        mlp, x = frozen(normalization), matrix(M, K)
        clean = mlp(x)
        x[3, 5], x[120, 7] = torch.nan, torch.inf
        assert_clean_but_for(mlp(x), clean, [3, 120])


def test_what_exceeds_a_bound_is_not_a_number() -> None:
    """Should rows not be what the bound took them for, they do not saturate."""
    given = operands(M, 144, 272, "relu", True)
    given[-1] /= 4
    q, _ = OPS.fp8_hidden_by_python(*given)
    y = recipes.product((given[0], given[1]), "row", (given[2], given[3]), "row") + given[7].float()
    assert torch.equal(q.isnan(), y > 448 * given[-1])
    assert q.isnan().any()


def assert_clean_but_for(found: Tensor, clean: Tensor, rows: list[int]) -> None:
    bad = torch.zeros(len(found), dtype=torch.bool, device=found.device)
    bad[rows] = True
    assert not found[bad].isfinite().any()
    assert torch.equal(found[~bad], clean[~bad])


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a.cpu().float(), b.cpu().float())
        for a, b in zip(found, expected, strict=True)
    )


def operands(
    M: int, K: int, N: int, activation: str, has_bias: bool, scaling: str = "row", seed: int = 0
) -> list[Any]:
    """Return what the op is called with; no product of these numbers is rounded."""
    torch.manual_seed(seed)
    numbers = [torch.randint(-2, 3, (n, K)).float().to(E4M3) for n in (M, N)]
    own = [torch.randint(-1, 3, (n, 1)).float().exp2() for n in (M, N)]
    own = [s if scaling == "row" else s[:1] for s in own]
    bias = (torch.arange(N) % 7 - 3.0).to(BF16) if has_bias else None
    y = recipes.product((numbers[0], own[0]), scaling, (numbers[1], own[1]), scaling)
    largest = (y.abs().amax() + 4) * 1.01
    one_scale = float(recipes.scale_of(largest, E4M3, power_of_two=True))
    given = [numbers[0], own[0], numbers[1], own[1], scaling, scaling, False, bias, activation]
    return [*given, BF16, None, None, None, False, None, None, True, 0.0, one_scale]
