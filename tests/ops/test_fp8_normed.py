"""A norm before FP8 layers whose rows are written in 8 bits alone: the same bits as without."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_kernels import running
from torch import Tensor
from torch.library import opcheck

import fused_norm as fn
from fused_norm import composition
from fused_norm.composition import Operands, Spec
from fused_norm.norms import NORMALIZATIONS, NORMS
from fused_norm.ops import normed_linears
from fused_norm.ops.eight_bits import quantize
from fused_norm.ops.scaled_norm_rows import LONGEST, norm_rows
from fused_norm.recipes import E4M3, Cast

BF16 = torch.bfloat16
K = 64
RECIPES = pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
NORMS_OF_EACH = pytest.mark.parametrize("normalization", NORMALIZATIONS)
# Which of gamma and beta there are, and what is added to gamma.
AFFINE = [("", 0.0), ("gamma", 0.0), ("beta", 0.0), ("gamma beta", 0.0), ("gamma", 1.0)]
AFFINE += [("gamma beta", 0.5)]
Step = Callable[[], list[Tensor]]


def matrix(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape).bfloat16()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return what decides whether calls on a CPU have the path that calls on Hopper have."""

    def decide(serves: bool) -> None:
        monkeypatch.setattr(normed_linears, "serves", lambda *_: serves)

    return decide


def parameters(affine: str, k: int = K) -> dict[str, Any]:
    """Return gamma and beta, as far as they are wanted."""
    return {
        f"norm_{name}": matrix(k, seed=seed).requires_grad_() if own in affine else None
        for seed, (name, own) in enumerate({"weight": "gamma", "bias": "beta"}.items(), 5)
    }


def both(step: Step, serve: Callable[[bool], None]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of a step with the norm's rows in bfloat16, and without."""
    serve(False)
    expected = step()
    serve(True)
    return expected, step()


def gradients(ys: Any, inputs: list[Tensor]) -> list[Tensor]:
    ys = [ys] if isinstance(ys, Tensor) else [*ys]
    found = torch.autograd.grad(ys, inputs, [matrix(*y.shape, seed=9) for y in ys])
    return [*(y.detach() for y in ys), *found]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        a, b = one.float(), other.float()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def function_of(y: Tensor) -> str:
    assert y.grad_fn is not None
    return str(y.grad_fn.name())


@NORMS_OF_EACH
@pytest.mark.parametrize(("affine", "offset"), AFFINE)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_bits(
    normalization: str,
    affine: str,
    offset: float,
    scaling: str,
    power_of_two: bool,
    by_kernels: bool,
    tmp_path: Path,
) -> None:
    """Rows and scales are those of the rounded norm; also what is no number, and rows of zeros."""
    for shape in ((2, 20, K), (16, 32), (1, 16), (33, 272)):
        k = shape[-1]
        x = matrix(*shape)
        x.view(-1, k)[-1] = 0
        if shape[0] > 2:
            x[3, 5], x[4, 0] = torch.nan, torch.inf
        own = parameters(affine, k)
        gamma, beta = (None if v is None else v.detach() for v in own.values())
        spec = Spec(normalization, eps=1e-5, weight_offset=offset)
        how = (normalization, 1e-5, offset, scaling, power_of_two)
        if by_kernels:
            with running(tmp_path) as ran:
                found = norm_rows(x, gamma, beta, *how)
            assert [name for name, _ in ran] == ["maxima", "quantize_by_maxima"]
        else:
            found = norm_rows(x, gamma, beta, *how)
        z = composition.normalized(spec, x, Operands(x, None, gamma, beta)).reshape(-1, k)
        q, scale, qt, qt_scale = quantize(z, Cast(E4M3, scaling), power_of_two, transposed=True)
        mean, rstd = NORMS[normalization].statistics(x.float(), 1e-5)
        expected = [q.view(shape), scale.expand(len(z), 1), qt, qt_scale.expand(k, 1)]
        expected += [v.unsqueeze(-1) for v in (rstd, mean) if v is not None]
        assert len({v.data_ptr() for v in found}) == len(found)
        if by_kernels:
            assert not found[2][:, len(z) :].float().any()
        # PyTorch's quotients make NaN of zeros where a scale is not finite.
        found[2], expected[2] = found[2][:, : len(z)], expected[2][:, : len(z)]
        assert_same(found, expected)


@NORMS_OF_EACH
def test_op(normalization: str) -> None:
    for shape in ((3, 5, 32), (16, 16), (0, 16)):
        own = parameters("gamma beta", shape[-1])
        tensors = [None if v is None else v.detach() for v in own.values()]
        how = (normalization, 1e-5, 0.0, "row", True)
        utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
        opcheck(
            torch.ops.fused_norm.fp8_norm_rows.default,
            (matrix(*shape), *tensors, *how),
            test_utils=utilities,
        )


@RECIPES
@NORMS_OF_EACH
@pytest.mark.parametrize(("affine", "offset"), AFFINE)
def test_a_layer(
    recipe: str, normalization: str, affine: str, offset: float, serve: Callable[[bool], None]
) -> None:
    own = parameters(affine)
    x, w, b = matrix(3, 15, K), matrix(128, K, seed=1), matrix(128, seed=2)
    inputs = [v.requires_grad_() for v in (x, w, b)] + [v for v in own.values() if v is not None]

    def step(activation: str | None) -> list[Tensor]:
        options: Any = {"normalization": normalization, "weight_offset": offset, "recipe": recipe}
        y = fn.norm_linear(x, w, b, activation=activation, **own, **options)
        return gradients(y, inputs)

    for activation in (None, "gelu", "swiglu"):
        expected, found = both(functools.partial(step, activation), serve)
        assert_same(found, expected)
    y = fn.norm_linear(x, w, b, normalization=normalization, recipe=recipe, **own)
    assert function_of(y) == "NormedLinearsBackward"


@RECIPES
@NORMS_OF_EACH
@pytest.mark.parametrize("by_kernels", [False, True])
def test_an_mlp_and_several_layers(
    recipe: str,
    normalization: str,
    by_kernels: bool,
    serve: Callable[[bool], None],
    tmp_path: Path,
) -> None:
    own = parameters("gamma beta")
    x, r = (matrix(40, K, seed=s).requires_grad_() for s in (0, 1))
    w, up, out = (matrix(128, K, seed=s).requires_grad_() for s in (2, 3, 4))
    down = matrix(K, 128, seed=7).requires_grad_()
    options: Any = {"normalization": normalization, "recipe": recipe, **own}
    inputs = [x, r, *(v for v in own.values() if v is not None)]

    def mlp() -> list[Tensor]:
        weights = (w, up)
        more: Any = {"activation": "swiglu", "residual": r, "return_sum": True}
        y = fn.norm_mlp(x, weights, None, down, None, **more, **options)
        return gradients(y, [*inputs, w, up, down])

    def several() -> list[Tensor]:
        y = fn.norm_linear(x, (w, up, out), None, residual=r, **options)
        return gradients(y, [*inputs, w, up, out])

    for step in (mlp, several):
        if not by_kernels:
            assert_same(*both(step, serve))
            continue
        with running(tmp_path) as ran:
            serve(False)
            expected = step()
            before = Counter(ran.matrices)
            ran.clear()
            serve(True)
            assert_same(step(), expected)
        # Nothing is quantized twice, and only the pass of an activation's gradient is gone.
        assert before == ran.matrices + Counter(maxima=step is mlp)


def test_launches(serve: Callable[[bool], None], tmp_path: Path) -> None:
    serve(True)
    torch.manual_seed(1)
    layer = fn.LayerNormMLP(K, 128, activation="gelu", recipe="rowwise", dtype=BF16)
    x = matrix(40, K).requires_grad_()
    with running(tmp_path) as ran:
        layer(x).backward(matrix(40, K, seed=2))
    expected = {"maxima": 4, "quantize_by_maxima": 5, "linear": 6}
    assert Counter(name for name, _ in ran) == expected
    assert ran.matrices == {"maxima": 5, "quantize_by_maxima": 6}


@RECIPES
@NORMS_OF_EACH
def test_what_is_saved(recipe: str, normalization: str, serve: Callable[[bool], None]) -> None:
    """x and what takes a byte for each number; not the normalized rows in 16 bits."""
    serve(True)
    x, w = matrix(40, K).requires_grad_(), matrix(32, K, seed=1).requires_grad_()
    gamma = matrix(K, seed=2).requires_grad_()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fn.norm_linear(x, w, norm_weight=gamma, normalization=normalization, recipe=recipe)
    given = {v.data_ptr() for v in (x, w, gamma)}
    assert {v.data_ptr() for v in saved if v.dtype is BF16} == given
    assert sorted(tuple(v.shape) for v in saved if v.dtype is E4M3) == [(K, 32), (K, 48)]


@RECIPES
@pytest.mark.parametrize("which", ["x", "gamma", "weight"])
def test_a_write_before_the_backward_is_an_error(
    recipe: str, which: str, serve: Callable[[bool], None]
) -> None:
    serve(True)
    tensors = {"x": matrix(40, K), "weight": matrix(32, K, seed=1), "gamma": matrix(K, seed=2)}
    x, w, gamma = (v.requires_grad_() for v in tensors.values())
    y = fn.norm_linear(x, w, norm_weight=gamma, recipe=recipe)
    with torch.no_grad():
        tensors[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.float().sum(), (x, w, gamma))


def test_a_second_derivative_is_an_error(serve: Callable[[bool], None]) -> None:
    serve(True)
    x, w = matrix(40, K).requires_grad_(), matrix(32, K, seed=1).requires_grad_()
    for has_graph in (False, True):
        y = fn.norm_linear(x, w, recipe="rowwise")
        dy = matrix(*y.shape, seed=3).requires_grad_(has_graph)
        first = torch.autograd.grad(y, (x, w), dy, create_graph=True)
        assert_same([v.detach() for v in first], gradients_by_a_second_call(x, w, dy.detach()))
        for gradient in first:
            for of in (x, w, dy)[: 2 + has_graph]:
                with pytest.raises(RuntimeError, match="no derivatives of gradients"):
                    torch.autograd.grad(gradient.float().sum(), of, retain_graph=True)


def gradients_by_a_second_call(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(fn.norm_linear(x, w, recipe="rowwise"), (x, w), dy)]


@RECIPES
@NORMS_OF_EACH
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (1, 2, 3), (0, 2), (1, 3)])
def test_some_gradients(
    recipe: str, normalization: str, wanted: tuple[int, ...], serve: Callable[[bool], None]
) -> None:
    x, w = matrix(40, K), matrix(32, K, seed=1)
    gamma, beta = matrix(K, seed=2), matrix(K, seed=3)
    inputs = [v for i, v in enumerate((x, w, gamma, beta)) if i in wanted]
    for v in inputs:
        v.requires_grad_()

    def step() -> list[Tensor]:
        options: Any = {"normalization": normalization, "recipe": recipe}
        y = fn.norm_linear(x, w, norm_weight=gamma, norm_bias=beta, **options)
        # Weights that are not trained keep nothing in 8 bits for their gradients.
        ours = function_of(y) == "NormedLinearsBackward"
        assert ours == (is_served[0] and 1 in wanted)
        return gradients(y, inputs)

    is_served = [False]
    serve(False)
    expected = step()
    serve(True)
    is_served[0] = True
    assert_same(step(), expected)


@RECIPES
def test_unused_layers_have_no_gradient(recipe: str, serve: Callable[[bool], None]) -> None:
    x, v, w = (matrix(48, K, seed=s).requires_grad_() for s in range(3))

    def step() -> list[Tensor]:
        y = fn.norm_linear(x, (v, w), recipe=recipe)[1]
        found = torch.autograd.grad(y, (x, v, w), matrix(*y.shape, seed=9), allow_unused=True)
        assert found[1] is None
        return [y.detach(), found[0], found[2]]

    expected, found = both(step, serve)
    assert_same(found, expected)


# PyTorch's own, of 2.11.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@NORMS_OF_EACH
@pytest.mark.parametrize("backend", ["inductor", "fused_norm"])
@pytest.mark.parametrize("leaves", [False, True])
def test_compiled(
    normalization: str,
    backend: str,
    leaves: bool,
    serve: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one graph; on Hopper, the first layers leave maxima of their activation."""
    serve(True)
    monkeypatch.setattr("fused_norm.ops.fp8.serves", lambda *_: leaves)
    x, r = (matrix(40, K, seed=s).requires_grad_() for s in (0, 1))
    w, up, down = (matrix(K, K, seed=s).requires_grad_() for s in (2, 3, 4))
    gamma = matrix(K, seed=5).requires_grad_()

    def mlp() -> list[Tensor]:
        options: Any = {"normalization": normalization, "recipe": "rowwise", "eps": 1e-5}
        options |= {"residual": r, "return_sum": True, "norm_weight": gamma}
        y, total = fn.norm_mlp(x, (w, up), None, down, None, activation="swiglu", **options)
        return [y, total]

    inputs = [x, r, w, up, down, gamma]
    expected = gradients(mlp(), inputs)
    torch.compiler.reset()
    found = gradients(torch.compile(mlp, backend=backend, fullgraph=True)(), inputs)
    for one, other in zip(found, expected, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 0.02


def test_calls_without_it(serve: Callable[[bool], None]) -> None:
    """What the kernels do not take is computed as before."""
    serve(True)
    x, w = matrix(32, K).requires_grad_(), matrix(32, K, seed=1).requires_grad_()
    gamma = matrix(K, seed=2).requires_grad_()
    scale = matrix(1, K, seed=3)
    calls: list[Callable[[], Any]] = [
        lambda: fn.norm_linear(x, w, norm_weight=gamma, recipe="rowwise_with_gw_hp"),
        lambda: fn.norm_linear(x, w, norm_weight=gamma, recipe="blockwise"),
        lambda: fn.norm_linear(x, w, norm_weight=gamma, scale=scale, recipe="rowwise"),
        lambda: fn.norm_linear(x, w, norm_weight=gamma, return_norm=True, recipe="rowwise")[0],
        lambda: fn.norm_linear(x, w, norm_weight=gamma.float(), recipe="rowwise"),
        lambda: fn.norm_linear(x, w.detach(), norm_weight=gamma, recipe="rowwise"),
        lambda: fn.norm_linear(x.float(), w.float(), recipe="rowwise"),
        lambda: fn.norm_linear(x[:0], w, recipe="rowwise"),
    ]
    for call in calls:
        assert function_of(call()) != "NormedLinearsBackward"
    long = LONGEST + 16
    rows, weight = matrix(1, long).requires_grad_(), matrix(16, long, seed=1).requires_grad_()
    assert function_of(fn.norm_linear(rows, weight, recipe="rowwise")) != "NormedLinearsBackward"
    with torch.autocast("cpu", BF16):
        y = fn.norm_linear(x, w, norm_weight=gamma, recipe="rowwise")
    assert function_of(y) != "NormedLinearsBackward"


@RECIPES
def test_main_grad_and_frozen_parameters(recipe: str, serve: Callable[[bool], None]) -> None:
    def step() -> list[Tensor]:
        torch.manual_seed(1)
        accumulates = {"fuse_wgrad_accumulation": True}
        layer = fn.LayerNormLinear(K, 128, recipe=recipe, dtype=BF16)
        adding = fn.LayerNormLinear(K, 128, recipe=recipe, dtype=BF16, **accumulates)
        x = matrix(40, K).requires_grad_()
        with fn.frozen_parameters(layer):
            y = [layer(x) for _ in range(2)]
            found = gradients(y, [x, *layer.parameters()])
        main_grad = torch.ones(128, K)
        setattr(adding.weight, "main_grad", main_grad)  # noqa: B010
        adding(x).backward(matrix(40, 128, seed=3))
        assert x.grad is not None
        return [*found, x.grad, main_grad]

    expected, found = both(step, serve)
    assert_same(found, expected)
    assert not torch.equal(found[-1], torch.ones(128, K))
