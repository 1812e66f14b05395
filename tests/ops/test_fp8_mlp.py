"""A norm and both layers of an MLP in FP8 as one function: the same bits as of two functions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import matrix
from fp8_kernels import running
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import is_gate
from fused_norm.norms import NORMALIZATIONS
from fused_norm.ops import fp8, normed_linears
from fused_norm.ops.eight_bits import quantize
from fused_norm.recipes import E4M3, Cast

BF16 = torch.bfloat16
M, K, N, K2 = 40, 64, 48, 32
OPS = torch.ops.fused_norm
# PyTorch does not compare numbers of 8 bits.
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
RECIPES = pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
CASES = pytest.mark.parametrize(
    ("activation", "is_pair"), [("gelu", False), ("swiglu", False), ("geglu", True)]
)
Serve = Callable[[bool], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Return what decides whether calls on a CPU have the path that calls on Hopper have."""

    def decide(serves: bool) -> None:
        monkeypatch.setattr(normed_linears, "serves", lambda *_: serves)
        monkeypatch.setattr(fp8, "serves", lambda *_: serves)

    return decide


class Mlp:
    """An MLP's tensors by name, and its calls."""

    def __init__(
        self, activation: str, is_pair: bool = False, has_bias: bool = True, k2: int = K2
    ) -> None:
        """Make all tensors that there may be, with gradients."""
        count, size = (2, N) if is_pair else (1, 2 * N if is_gate(activation) else N)
        own = {"x": matrix(2, M // 2, K), "gamma": matrix(K, seed=1), "beta": matrix(K, seed=2)}
        for i in range(count):
            own[f"weight{i}"] = matrix(size, K, seed=3 + i) / 8
        own["down"] = matrix(k2, N, seed=5) / 8
        own["residual"] = matrix(2, M // 2, k2, seed=6)
        if has_bias:
            # Not aligned to 16 bytes.
            own |= {f"bias{i}": matrix(size + 1, seed=7 + i)[1:] for i in range(count)}
            own["down_bias"] = matrix(k2, seed=9)
        self.activation, self.is_pair = activation, is_pair
        self.tensors = {name: v.detach().requires_grad_() for name, v in own.items()}

    def __call__(self, recipe: str, normalization: str = "layer_norm", **options: Any) -> Any:
        """Return the result; options may replace the residual."""
        t = self.tensors
        weights = tuple(v for name, v in t.items() if name.startswith("weight"))
        biases = tuple(v for name, v in t.items() if name.startswith("bias")) or None
        given: Any = (weights, biases)
        if not self.is_pair:
            given = (weights[0], None if biases is None else biases[0])
        of_norm = {"norm_weight": t["gamma"], "norm_bias": t["beta"]}
        options = {"residual_out": t.get("residual")} | of_norm | options
        last = (t["down"], t.get("down_bias"))
        how: Any = {"activation": self.activation, "normalization": normalization}
        return fn.norm_mlp(t["x"], *given, *last, recipe=recipe, **how, **options)

    def trained(self) -> list[Tensor]:
        return [v for v in self.tensors.values() if v.requires_grad]


def gradients(y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, inputs, matrix(*y.shape, seed=10))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.float(), other.float()), place


def is_one_function(y: Tensor) -> bool:
    assert y.grad_fn is not None
    return "NormedMlp" in y.grad_fn.name()


@RECIPES
@CASES
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_steps(
    recipe: str,
    activation: str,
    is_pair: bool,
    normalization: str,
    has_bias: bool,
    by_kernels: bool,
    serve: Serve,
    tmp_path: Path,
) -> None:
    mlp = Mlp(activation, is_pair, has_bias)

    def step() -> list[Tensor]:
        y = mlp(recipe, normalization)
        assert is_one_function(y) == is_served[0]
        return gradients(y, mlp.trained())

    is_served = [False]
    serve(False)
    expected = step()
    is_served[0] = True
    serve(True)
    if not by_kernels:
        assert_same(step(), expected)
        return
    with running(tmp_path) as ran:
        found = step()
    count = 1 + is_pair
    # Each product has one of its gradients, and one of its weight's. x, weights and dy have their
    # maxima found; products keep those of the activation and of its input's gradient.
    launches = Counter(name for name, _ in ran)
    assert ran.matrices == {"maxima": 1 + count + 2, "quantize_by_maxima": 1 + count + 3 + count}
    # Weights of the same rows have one of each, as have the activation and its weight.
    expected_launches = {"maxima": 4, "quantize_by_maxima": 4 + count, "linear": 4 + 2 * count}
    assert launches == expected_launches
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if place and mlp.trained()[place - 1].dim() == 1:
            # Sums of rows have an order of their own.
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(one, other), place


@RECIPES
@CASES
def test_some_gradients(recipe: str, activation: str, is_pair: bool, serve: Serve) -> None:
    """Any tensors may be frozen, as long as a weight before the activation is not."""
    mlp = Mlp(activation, is_pair)
    groups = ("x", "norm", "first", "second", "residual")
    belong = {"gamma": "norm", "beta": "norm", "down": "second", "down_bias": "second"}
    belong |= {name: name for name in ("x", "residual")}
    subsets = [{name: name != left for name in mlp.tensors} for left in ("", *mlp.tensors)]
    for chosen in itertools.product((False, True), repeat=len(groups)):
        trains = dict(zip(groups, chosen, strict=True))
        subsets.append({name: trains[belong.get(name, "first")] for name in mlp.tensors})
    for subset in subsets:
        for name, v in mlp.tensors.items():
            v.requires_grad_(subset[name])
        if not mlp.trained():
            continue
        serve(False)
        expected = gradients(mlp(recipe), mlp.trained())
        serve(True)
        y = mlp(recipe)
        ours = any(subset[name] for name in subset if name.startswith("weight"))
        assert is_one_function(y) == ours
        assert_same(gradients(y, mlp.trained()), expected)


@RECIPES
def test_one_gradient_of_a_trained_mlp(recipe: str, serve: Serve) -> None:
    mlp = Mlp("geglu", True)
    serve(False)
    expected = gradients(mlp(recipe), mlp.trained())
    serve(True)
    for v, gradient in zip(mlp.trained(), expected[1:], strict=True):
        assert_same(gradients(mlp(recipe), [v])[1:], [gradient])


@RECIPES
@pytest.mark.parametrize("residual", ["none", "x", "the sum", "broadcast"])
def test_residuals(recipe: str, residual: str, serve: Serve) -> None:
    """Also one that is the norm's input, and one that PyTorch adds to the result."""
    mlp = Mlp("gelu", k2=K)
    extra = matrix(2, M // 2, K, seed=11).requires_grad_()
    options: dict[str, Any] = {
        "none": {"residual_out": None},
        "x": {"residual_out": mlp.tensors["x"]},
        "the sum": {"residual": extra, "return_sum": True},
        "broadcast": {"residual_out": matrix(K, seed=12).requires_grad_()},
    }[residual]
    inputs = [*mlp.trained(), extra, *(v for v in options.values() if isinstance(v, Tensor))]

    def step() -> list[Tensor]:
        ys = mlp(recipe, **options)
        ys = [ys] if isinstance(ys, Tensor) else [*ys]
        dys = [matrix(*y.shape, seed=13) for y in ys]
        found = torch.autograd.grad(ys, inputs, dys, materialize_grads=True)
        return [*(y.detach() for y in ys), *found]

    serve(False)
    expected = step()
    serve(True)
    assert_same(step(), expected)
    if residual != "broadcast":
        return
    # The residual is added to the function's result, like before.
    assert not is_one_function(mlp(recipe, **options))


@RECIPES
@pytest.mark.parametrize("which", ["x", "gamma", "weight0", "weight1", "down"])
def test_a_write_before_the_backward_is_an_error(recipe: str, which: str, serve: Serve) -> None:
    serve(True)
    mlp = Mlp("swiglu", True)
    y = mlp(recipe)
    with torch.no_grad():
        mlp.tensors[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(y, mlp.trained())


def test_a_second_derivative_is_an_error(serve: Serve) -> None:
    serve(True)
    mlp = Mlp("swiglu", True, has_bias=False)
    del mlp.tensors["residual"]
    inputs = mlp.trained()
    expected = gradients(mlp("rowwise"), inputs)
    for has_graph in (False, True):
        y = mlp("rowwise")
        dy = matrix(*y.shape, seed=10).requires_grad_(has_graph)
        first = torch.autograd.grad(y, inputs, dy, create_graph=True)
        assert_same([y.detach(), *(v.detach() for v in first)], expected)
        for gradient in first:
            for of in [*inputs, dy][: len(inputs) + has_graph]:
                with pytest.raises(RuntimeError, match="no derivatives of gradients"):
                    torch.autograd.grad(gradient.float().sum(), of, retain_graph=True)


# PyTorch's own, of 2.11.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("recipe", "activation", "is_pair", "residual", "trains_down"),
    [
        ("rowwise", "gelu", False, "own", True),
        ("rowwise", "geglu", True, "x", True),
        ("rowwise", "swiglu", False, "none", False),
        ("tensorwise", "geglu", True, "own", False),
        ("tensorwise", "gelu", False, "x", True),
    ],
)
def test_compiled(
    recipe: str, activation: str, is_pair: bool, residual: str, trains_down: bool, serve: Serve
) -> None:
    """In one graph, whose backward has the op."""
    serve(True)
    mlp = Mlp(activation, is_pair, k2=K)
    mlp.tensors["down"].requires_grad_(trains_down)
    options = {"own": {}, "x": {"residual_out": mlp.tensors["x"]}, "none": {"residual_out": None}}
    inputs = [v for v in mlp.trained() if residual == "own" or v is not mlp.tensors["residual"]]
    graphs: list[str] = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append(str(module.code))
        return make_boxed_func(module.forward)

    def step() -> Tensor:
        found: Tensor = mlp(recipe, **options[residual])
        return found

    expected = gradients(step(), inputs)
    torch.compiler.reset()
    # On a CPU, PyTorch has no op for the gradients of these norms.
    table = select_decomp_table()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=table)
    found = gradients(torch.compile(step, backend=backend, fullgraph=True)(), inputs)
    assert [code.count("fp8_mlp_backward.default(") for code in graphs] == [0, 1]
    of_norm = [mlp.tensors[name] for name in ("x", "gamma", "beta")]
    for v, one, other in zip([None, *inputs], found, expected, strict=True):
        if any(v is other for other in of_norm):
            assert (one.float() - other.float()).norm() < 0.02 * other.float().norm()
        else:
            assert_same([one], [other])


def test_exported_programs_keep_their_ops(serve: Serve) -> None:
    serve(True)
    mlp = Mlp("swiglu", True)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = mlp("rowwise", residual_out=x[..., :K2])
            return found

    program = torch.export.export(Model(), (mlp.tensors["x"].detach(),))
    assert "fp8_layers" in str(program)
    assert "NormedMlp" not in str(program)


def arguments(
    activation: str, is_pair: bool, recipe: str, wanted: list[int], in_8_bits: bool
) -> tuple[Any, ...]:
    """Return what the op is called with."""
    how, count = recipes.find(recipe), 1 + is_pair
    size = N * (1 + is_gate(activation)) // count
    z, h, a = matrix(M, K), matrix(M, count * size, seed=1), matrix(M, N, seed=2)
    weights = [matrix(size, K, seed=3 + i) / 8 for i in range(count)]
    down, dy = matrix(K2, N, seed=5) / 8, matrix(2, M // 2, K2, seed=6)
    grad = (how.grad.scaling, how.grad.dtype is not E4M3, how.weight_for_dgrad.scaling)
    last = (*grad, how.input.scaling, how.power_of_two, how.has_fp8_wgrad, wanted, False)
    none = [None] * count
    if not in_8_bits:
        return z, None, h, activation, weights, none, a, None, down, None, dy, *last

    def transposed(v: Tensor) -> list[Tensor]:
        cast = Cast(E4M3, how.input.scaling)
        q, scale = quantize(v, cast, how.power_of_two, plain=False, transposed=True)
        return [q, scale.expand(len(q), 1).contiguous()]

    made = [transposed(w) for w in weights]
    of_first = ([q for q, _ in made], [scale for _, scale in made])
    rows = (*transposed(z), h, activation, *of_first)
    return *rows, *transposed(a), *transposed(down), dy, *last


def all_places(is_pair: bool) -> list[int]:
    return list(range(5 + 2 * is_pair))


@CASES
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_registration(activation: str, is_pair: bool, in_8_bits: bool, tmp_path: Path) -> None:
    places = all_places(is_pair)
    with running(tmp_path) as ran:
        for wanted in (places, [0], [1], places[-2:], places[-1:], [0, places[-2]], places[1:]):
            given = arguments(activation, is_pair, "rowwise", wanted, in_8_bits)
            opcheck(OPS.fp8_mlp_backward.default, given, test_utils=OF_8_BITS)
    assert ran


@pytest.mark.parametrize("recipe", [*recipes.RECIPES])
@pytest.mark.parametrize(
    ("activation", "is_pair"),
    [
        *(("gelu", False), ("silu", False), ("swiglu", False), ("geglu", True)),
        *(("relu", False), ("reglu", True)),
    ],
)
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_op(recipe: str, activation: str, is_pair: bool, in_8_bits: bool, tmp_path: Path) -> None:
    """The op by kernels is two ops of layers, for any gradients and also where it declines."""
    how = recipes.find(recipe)
    if in_8_bits and not how.has_fp8_wgrad:
        return
    places = all_places(is_pair)
    for wanted in (places, places[::-1], [0], [1, 3], places[-2:], [0, places[-1]], places[1:]):
        given = arguments(activation, is_pair, recipe, wanted, in_8_bits)
        expected = OPS.fp8_mlp_backward_by_python(*given)
        with running(tmp_path) as ran:
            found = OPS.fp8_mlp_backward(*given)
        names = [name for name, _ in ran]
        is_first, wants_down = min(wanted) < places[-2], places[-2] in wanted
        of_first = (1 + is_pair) * (0 in wanted)
        if in_8_bits:
            of_first += sum(0 < place < 2 + is_pair for place in wanted)
            assert names.count("linear") == is_first + wants_down + of_first
            # Of dy alone: products keep those of what follows, unless that is not smooth.
            of_dy = wants_down or (how.grad.scaling == "tensor" and is_first)
            is_pass = is_first and activation in ("relu", "reglu")
            assert names.count("maxima") == of_dy + is_pass
        for place, one, other in zip(wanted, found, expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            if one.dim() == 1:
                torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
            else:
                assert torch.equal(one, other), place


def test_a_gradient_without_its_values_in_memory(tmp_path: Path) -> None:
    given = list(arguments("swiglu", False, "rowwise", all_places(False), True))
    place = 10
    dy = given[place]
    assert dy.shape == (2, M // 2, K2)
    negative = [*given[:place], -dy, *given[place + 1 :]]
    with running(tmp_path) as ran:
        expected = OPS.fp8_mlp_backward(*negative)
        given[place] = torch._neg_view(dy)
        assert_same(OPS.fp8_mlp_backward(*given), expected)
        given[place] = torch._efficientzerotensor(dy.shape, dtype=dy.dtype)
        assert not any(v.any() for v in OPS.fp8_mlp_backward(*given))
    assert "linear" in [name for name, _ in ran]


def test_operations_are_counted(serve: Serve) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    mlp, found = Mlp("swiglu", True), list[int]()
    for serves in (False, True):
        serve(serves)
        with FlopCounterMode(display=False) as counter:
            gradients(mlp("rowwise"), mlp.trained())
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0


@RECIPES
def test_what_is_saved(recipe: str, serve: Serve) -> None:
    """The activation's input in 16 bits; the rows, the activation and weights in 8."""
    serve(True)
    mlp, saved = Mlp("swiglu", True), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mlp(recipe)
    given = {v.data_ptr() for v in mlp.tensors.values()}
    wide = [v for v in saved if v.dtype is BF16 and v.data_ptr() not in given]
    assert [v.shape for v in wide] == [(M, 2 * N)]
    shapes = [(K, 48), (K, N), (K, N), (N, 48), (N, K2)]
    assert sorted(v.shape for v in saved if v.dtype is E4M3) == sorted(shapes)


def test_calls_without_it(serve: Serve) -> None:
    """What it does not take is computed as before."""
    serve(True)
    assert is_one_function(Mlp("gelu")("rowwise", residual_out=None))
    mlp = Mlp("swiglu", True)
    for recipe in ("rowwise_with_gw_hp", "blockwise"):
        assert not is_one_function(mlp(recipe))
    assert not is_one_function(mlp("rowwise", scale=matrix(1, K), residual_out=None))
    with torch.autocast("cpu", BF16):
        assert not is_one_function(mlp("rowwise"))
    t = mlp.tensors
    weights, one_bias = (t["weight0"], t["weight1"]), (t["bias0"], None)
    how: Any = {"recipe": "rowwise", "norm_weight": t["gamma"]}
    y = fn.norm_mlp(t["x"], weights, one_bias, t["down"], activation="swiglu", **how)
    assert not is_one_function(y)
    y = fn.norm_mlp(t["x"], t["weight0"], None, t["down"], activation=None, **how)
    assert not is_one_function(y)


@pytest.mark.parametrize("wrong", ["dtype", "features", "bias dtype", "bias size"])
def test_errors_are_those_of_before(wrong: str, serve: Serve) -> None:
    mlp = Mlp("gelu")
    t = mlp.tensors
    if wrong == "dtype":
        t["down"] = t["down"].detach().float().requires_grad_()
    elif wrong == "features":
        t["down"] = matrix(K2, N + 16).requires_grad_()
    elif wrong == "bias dtype":
        t["down_bias"] = t["down_bias"].detach().float().requires_grad_()
    else:
        t["down_bias"] = matrix(K2 + 1).requires_grad_()
    found = []
    for serves in (False, True):
        serve(serves)
        with pytest.raises(RuntimeError) as error:
            mlp("rowwise")
        found.append(str(error.value))
    assert found[0] == found[1]


@RECIPES
@CASES
def test_main_grad_and_frozen_parameters(
    recipe: str, activation: str, is_pair: bool, serve: Serve
) -> None:
    def step() -> list[Tensor]:
        mlp = Mlp(activation, is_pair)
        torch.manual_seed(1)
        layer = fn.LayerNormMLP(K, N, activation="gelu", recipe=recipe, dtype=BF16)
        x = matrix(M, K).requires_grad_()
        with fn.frozen_parameters(layer):
            ys = [layer(x) for _ in range(2)]
            dys = [matrix(*y.shape, seed=3) for y in ys]
            found = [*torch.autograd.grad(ys, [x, *layer.parameters()], dys)]
        return [*gradients(mlp(recipe), mlp.trained()), *found]

    serve(False)
    expected = step()
    serve(True)
    assert_same(step(), expected)
