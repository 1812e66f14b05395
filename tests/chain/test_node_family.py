"""The op family and the trained eps's norm in C++: every member, and what is left to Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import family
import pytest
import torch
import torch.nn.functional as F
from accuracy import as_copies
from family import PLAIN
from family_cases import CASES
from torch import Tensor

import fused_norm as fn
from fused_norm.ops import node, norm_linear

# The C++ node's name for the members with one Linear layer, and with two.
NAMES = {"norm_linear": "NormLinearBackward", "norm_mlp": "NormMlpBackward"}


@pytest.fixture
def python_forwards(watch: Callable[..., list[Any]]) -> list[Any]:
    """See the calls whose forward is Python's."""
    return watch(norm_linear, "call")


def is_dense(case: dict[str, Any]) -> bool:
    """Return whether a case has a modulation that kernels take as it is."""
    return case["modulation"] not in ("sequence", "token", "both alike")


# Every option is among them: values are compared in test_family.py, by C++ where that is built.
SOME = [case for case in CASES if is_dense(case) and case["dtype"] is not torch.bfloat16][:24]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_every_member_without_python(
    case: dict[str, Any],
    python_calls: list[Tensor],
    python_forwards: list[Any],
) -> None:
    family.check(case, family.make_tensors(case))
    assert not python_calls
    assert not python_forwards


SHAPE = ((3, 4), 24, 16)
MEMBERS: dict[str, dict[str, Any]] = {
    "residual": {"residual": True, "return_sum": True, "normalization": "rms_norm"},
    "sum not returned": {"residual": True, "activation": "gelu"},
    "norm returned": {"return_norm": True},
    "AdaLN": {"modulation": "batch", "gamma": "missing", "beta": False},
    "q, k, v": {"weights": 3},
    "gate of two": {"weights": 2, "activation": "swiglu"},
    "MLP": {"op": "norm_mlp", "activation": "geglu", "residual_out": True},
    "recomputed": {"op": "norm_mlp", "activation": "silu", "recompute": True},
}


# One norm and Linear layer, several, a gate and an MLP are enough of them.
SLOW_IN_BFLOAT16: dict[str, Any] = {
    name: () if name in ("residual", "q, k, v", "gate of two", "recomputed") else pytest.mark.slow
    for name in MEMBERS
}


def member(name: str, **others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    case = PLAIN | {"shape": SHAPE} | MEMBERS[name] | others
    return case, family.make_tensors(case)


@pytest.mark.parametrize("name", MEMBERS)
def test_second_derivatives(name: str, python_calls: list[Tensor]) -> None:
    case, tensors = member(name, dtype=torch.float64, shape=((2, 2), 5, 4))
    leaves = list(family.leaves(tensors).values())

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        rest = iter(values)
        return tuple(family.ours(case, family.replaced(tensors, lambda v: _next(v, rest))))

    def _next(value: list[Any], rest: Any) -> list[Any]:
        return [None if each is None else next(rest) for each in value]

    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
    assert python_calls


@pytest.mark.parametrize("name", MEMBERS)
def test_any_gradient_alone(name: str, python_calls: list[Tensor]) -> None:
    """`autograd.grad` asks for one of the tensors, all of which require a gradient."""
    case, tensors = member(name)
    results = family.ours(case, tensors)
    grads = [torch.randn_like(result) for result in results]
    leaves = family.leaves(tensors)
    every = torch.autograd.grad(results, list(leaves.values()), grads, retain_graph=True)
    for leaf, expected in zip(leaves.values(), every, strict=True):
        (alone,) = torch.autograd.grad(results, leaf, grads, retain_graph=True)
        torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)
    assert not python_calls


@pytest.mark.parametrize("name", MEMBERS)
def test_gradient_of_one_result_alone(name: str, python_calls: list[Tensor]) -> None:
    case, tensors = member(name)
    copies = family.replaced(tensors, as_copies)
    for index in range(len(family.ours(case, tensors))):
        gradients = []
        for values, run in ((tensors, family.ours), (copies, family.eager)):
            result = run(case, values)[index]
            leaves = list(family.leaves(values).values())
            gradients.append(
                torch.autograd.grad(result, leaves, torch.ones_like(result) / 7, allow_unused=True)
            )
        for mine, expected in zip(*gradients, strict=True):
            assert (mine is None) == (expected is None)
            if mine is not None:
                torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
    assert not python_calls


@pytest.mark.as_dispatched
@pytest.mark.usefixtures("python_calls")
@pytest.mark.parametrize(
    ("dtype", "shape", "name"),
    [
        *itertools.product([torch.float32], [((2, 300), 1000, 900), ((1, 1), 1000, 900)], MEMBERS),
        # Each takes a CPU seconds, and goes the way of one row in float32.
        *(
            pytest.param(torch.bfloat16, ((1, 1), 4000, 3000), name, marks=marks)
            for name, marks in SLOW_IN_BFLOAT16.items()
        ),
    ],
    ids=str,
)
def test_around_products_of_pytorch(
    name: str, dtype: torch.dtype, shape: Any, python_forwards: list[Any]
) -> None:
    """Where ours is slower the product is PyTorch's, and still nothing is Python's."""
    case, tensors = member(name, shape=shape, dtype=dtype)
    family.check(case, tensors)
    assert not python_forwards


@pytest.mark.as_dispatched
def test_an_activation_replaces_nothing_that_a_caller_sees() -> None:
    """In an inference it takes the product's place, and the normalized rows keep theirs."""
    x, weight = torch.randn(1, 1000), torch.randn(900, 1000) / 30
    with torch.no_grad():
        y, z = fn.norm_linear(x, weight, activation="gelu", return_norm=True)
        alone = fn.norm_linear(x, weight, activation="gelu")
    torch.testing.assert_close(z, F.layer_norm(x, (1000,)))
    torch.testing.assert_close(y, F.gelu(F.linear(z, weight)))
    torch.testing.assert_close(alone, y)


def test_bias_alone_is_a_parameter(python_calls: list[Tensor]) -> None:
    """Nothing is saved of a bias that no gradient depends on."""
    x, weight = torch.randn(5, 8), torch.randn(6, 8)
    bias = torch.randn(6, requires_grad=True)
    grad = torch.randn(5, 6)
    y = fn.norm_linear(x, weight, bias, normalization="rms_norm")
    (found,) = torch.autograd.grad(y, bias, grad, create_graph=True)
    torch.testing.assert_close(found, grad.sum(0))
    assert len(python_calls) == 1
    y = fn.norm_linear(x, weight, bias, normalization="rms_norm")
    torch.testing.assert_close(torch.autograd.grad(y, bias, grad)[0], grad.sum(0))
    assert len(python_calls) == 1


@pytest.mark.parametrize("name", MEMBERS)
def test_what_is_saved(name: str, python_calls: list[Tensor]) -> None:
    """x or the sum, parameters, statistics, and the product before its activation: no more."""
    case, tensors = member(name)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        results = family.ours(case, tensors)
    assert results[0].grad_fn.name() == NAMES[case["op"]]
    rows = SHAPE[0]
    large = [t for t in packed if t.shape[:-1] == rows]
    keeps_product = case["activation"] is not None and not case["recompute"]
    assert len(large) == 1 + keeps_product
    statistics = [t for t in packed if t.shape == rows]
    assert len(statistics) == (1 if case["normalization"] == "rms_norm" else 2)


def _compiled_gradients(run: Callable[..., Any], tensors: dict[str, Any]) -> list[Tensor]:
    results = run(tensors)
    grads = [torch.sin(torch.arange(r.numel()).view(r.shape)).to(r.dtype) for r in results]
    return [*results, *torch.autograd.grad(results, list(family.leaves(tensors).values()), grads)]


@pytest.mark.parametrize("name", MEMBERS)
def test_compiled_graphs(name: str, python_calls: list[Tensor]) -> None:
    case, tensors = member(name)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(tensors: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(family.ours(case, tensors))

    mine = _compiled_gradients(run, tensors)
    others = _compiled_gradients(lambda t: family.ours(case, t), tensors)
    assert not python_calls
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])
def test_linear_add_of_compiled_graphs(has_bias: bool, has_residual: bool) -> None:
    x, weight, grad = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(3, 2, 6).transpose(0, 1)
    bias = torch.randn(6) if has_bias else None
    residual = torch.randn(2, 3, 6) if has_residual else None
    places = [0, *[1] * has_residual, *[2] * has_bias]
    y = torch.ops.fused_norm.linear_add(x, weight, bias, residual)
    found = torch.ops.fused_norm.linear_add_backward(grad, x, weight, places)
    expected = F.linear(x, weight, bias) + (0 if residual is None else residual)
    torch.testing.assert_close(y, expected)
    rows = grad.reshape(-1, 6)
    every = [grad @ weight, rows.t() @ x.reshape(-1, 8), rows.sum(0)]
    torch.testing.assert_close(found, [every[place] for place in places])


def test_compiled_graph_called_under_autocast() -> None:
    """A graph has its dtypes from when it was traced, and no op in it is to change them."""
    _, tensors = member("MLP", dtype=torch.float64)
    operands = [tensors[name] for name in ("x", "norm_weight")]
    op = torch.ops.fused_norm.norm_linear_forward.default
    weights = [w.detach() for w in tensors["weight"]]
    absent = [None] * 8
    arguments = [operands[0].detach(), None, operands[1].detach(), *absent, weights, [None]]
    kind = ("rms_norm", "gelu", 1e-6, 0.0, True, False, False, False, False)
    with torch.autocast("cpu", torch.bfloat16):
        found = op(*arguments, *kind, True)
    assert found[0].dtype == found[-1].dtype == torch.float64
    expected = F.linear(F.rms_norm(operands[0], (24,), operands[1], 1e-6), weights[0])
    torch.testing.assert_close(found[-1], expected.detach())


def _sequence(t: dict[str, Any]) -> None:
    t["scale"] = torch.randn(1, SHAPE[0][1], SHAPE[1], requires_grad=True)


@pytest.mark.parametrize("options", [{"eps": 1}, {"return_sum": 1}, {"return_norm": 1}])
def test_options_of_other_types(
    options: dict[str, Any], python_calls: list[Tensor], python_forwards: list[Any]
) -> None:
    """Options mean the same in C++ and Python, whatever calls came before."""
    x, w, r = torch.randn(3, 8), torch.randn(4, 8), torch.randn(3, 8)
    fn.norm_linear(x, w, residual=r, eps=1.0)
    found = fn.norm_linear(x, w, residual=r, **options)
    assert not python_forwards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "module", lambda: None)
        expected = fn.norm_linear(x, w, residual=r, **options)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


def test_many_eps(python_calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The node caches specs of a limited number of calls, and then asks for them again."""
    monkeypatch.setattr(node, "_MOST_SPECS", 3)
    monkeypatch.setattr(node, "_specs", type(node._specs)())
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    for eps in [0.1, 0.2, 0.3, 0.4, 0.1]:
        expected = F.linear(F.layer_norm(x, (8,), eps=eps), w)
        torch.testing.assert_close(fn.norm_linear(x, w, eps=eps), expected)
        assert len(node._specs) <= 3


PYTHONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "strided x": lambda t: t.update(x=torch.randn(4, 3, 24).transpose(0, 1)),
    "subclass": lambda t: t.update(x=t["x"].detach().as_subclass(type("Own", (Tensor,), {}))),
    "modulation of other rows": _sequence,
}


@pytest.mark.parametrize("change", PYTHONS)
def test_what_is_left_to_python(
    change: str,
    python_calls: list[Tensor],
    python_forwards: list[Any],
) -> None:
    _, tensors = member("norm returned")
    PYTHONS[change](tensors)
    arguments = dict(tensors)
    x, weights, biases = (arguments.pop(name) for name in ("x", "weight", "bias"))

    def run() -> Tensor:
        return fn.norm_linear(x, weights[0], biases[0], activation="silu", **arguments)

    y = run()
    assert len(python_forwards) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "module", lambda: None)
        torch.testing.assert_close(y, run())


def test_a_profiler_sees_the_call(python_calls: list[Tensor]) -> None:
    case, tensors = member("MLP")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        family.ours(case, tensors)[0].sum().backward()
    names = {event.name for event in profile.events()}
    assert {"fused_norm::norm_mlp", "NormMlpBackward"} <= names


@pytest.mark.parametrize("shape", [(3, 17), (2, 5, 64), (9,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_trained_eps(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    python_calls: list[Tensor],
) -> None:
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("no float64 kernels on a GPU")
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    leaves = [torch.randn(shape, **kind), torch.full((1,), 0.3, **kind)]
    grad = torch.randn(shape, **kind)

    def run() -> list[Tensor]:
        x, o = (leaf.clone().requires_grad_() for leaf in leaves)
        y = fn.trainable_eps_layer_norm(x, o)
        names.append(y.grad_fn.name())
        return [y, *torch.autograd.grad(y, (x, o), grad)]

    names: list[str] = []
    mine = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "module", lambda: None)
        others = run()
    assert names == ["TrainableEpsLayerNormBackward", "EagerBackward"]
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def test_trained_eps_twice(python_calls: list[Tensor]) -> None:
    leaves = [torch.randn(3, 5).double(), torch.full((1,), 0.3).double()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(fn.trainable_eps_layer_norm, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(fn.trainable_eps_layer_norm, leaves)
