"""A norm's backward adds the gradients of its input: no kernel of PyTorch's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import family
import pytest
import torch
from accuracy import as_copies
from family import PLAIN
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils import checkpoint as checkpoints

import fused_norm as fn
from fused_norm.ops import node
from fused_norm.ops.operands import at_every_size

ADD = torch.ops.aten.add.Tensor
K, N = 24, 16
# What `residual_out` is when it is x, and other options of the call.
MLP = PLAIN | {"op": "norm_mlp", "activation": "gelu", "shape": ((2, 5), K, N)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "RMSNorm": {"normalization": "rms_norm", "beta": False},
    "gate": {"activation": "swiglu", "weights": 2},
    "returned": {"return_sum": True},
    "with its rows": {"return_sum": True, "return_norm": True, "recompute": True},
}
Call = Callable[..., Any]


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    case = MLP | CASES[name] | {"dtype": dtype}
    return case, family.make_tensors(case)


def with_x(function: Call, case: dict[str, Any], tensors: dict[str, Any]) -> list[Tensor]:
    """Return the results of a call whose output adds x itself."""
    same = case | {"residual_out": True}
    found: list[Tensor] = function(same, tensors | {"residual_out": tensors["x"]})
    return found


def gradients(results: list[Tensor], tensors: dict[str, Any]) -> dict[str, Tensor]:
    leaves = family.leaves(tensors)
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in results]
    grads = [dy.to(y.dtype) for dy, y in zip(dys, results, strict=True)]
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype, chain: str) -> None:
    case, tensors = made(name, dtype)
    exact = family.replaced(tensors, lambda each: [v.detach().double() for v in each])
    exact = family.replaced(exact, lambda each: [v.requires_grad_() for v in each])
    results, truths = with_x(family.ours, case, tensors), with_x(family.eager, case, exact)
    found, wanted = gradients(results, tensors), gradients(truths, exact)
    limit = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    for key, gradient in wanted.items():
        assert (found[key].double() - gradient).norm() <= limit * gradient.norm(), key


@pytest.mark.parametrize("name", ["plain", "with its rows"])
def test_derivatives_of_gradients(name: str, chain: str) -> None:
    case, tensors = made(name, torch.float64)
    names, leaves = list(family.leaves(tensors)), list(family.leaves(tensors).values())

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, values, strict=True))
        changed = {
            key: [given[f"{key}[{i}]"] for i in range(len(value))]
            if isinstance(value, list)
            else given.get(key)
            for key, value in tensors.items()
        }
        return tuple(with_x(family.ours, case, changed))

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def additions(call: Call) -> int:
    """Return how many additions of PyTorch a function runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name in ("aten::add", "aten::add_") for event in profile.events())


@pytest.mark.parametrize("name", ["plain", "RMSNorm", "gate"])
def test_no_kernel_of_pytorch_adds(name: str, chain: str) -> None:
    case, tensors = made(name)
    with at_every_size():
        y = with_x(family.ours, case, tensors)[0]
        leaves = list(family.leaves(tensors).values())
        assert not additions(lambda: torch.autograd.grad(y, leaves, torch.ones_like(y)))


def test_some_gradients(chain: str) -> None:
    """Of each tensor alone, from each result alone; and with each of them frozen."""
    case, tensors = made("with its rows")
    leaves = family.leaves(tensors)
    results, truths = (with_x(f, case, tensors) for f in (family.ours, family.eager))
    for mine, other in zip(results, truths, strict=True):
        for leaf in leaves.values():
            found, wanted = (
                torch.autograd.grad(y.sum(), leaf, retain_graph=True, allow_unused=True)[0]
                if y.requires_grad
                else None
                for y in (mine, other)
            )
            assert (found is None) == (wanted is None)
            if wanted is not None and found is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for frozen in leaves:
        copies = family.replaced(tensors, as_copies)
        family.leaves(copies)[frozen].requires_grad_(False)
        others = [leaf for leaf in family.leaves(copies).values() if leaf.requires_grad]
        found, wanted = (
            torch.autograd.grad(with_x(f, case, copies)[0].sum(), others, allow_unused=True)
            for f in (family.ours, family.eager)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["detached", "a view", "a copy"])
def test_another_tensor_of_the_same_values(name: str, chain: str) -> None:
    case, tensors = made("plain")
    x = tensors["x"]
    added = {"detached": x.detach(), "a view": x.view_as(x), "a copy": x.clone()}[name]
    leaves = list(family.leaves(tensors).values())
    given = case | {"residual_out": True}, tensors | {"residual_out": added}
    found, wanted = (
        torch.autograd.grad(f(*given)[0].square().sum(), leaves)
        for f in (family.ours, family.eager)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_x_written_after_the_call(chain: str) -> None:
    case, tensors = made("plain")
    x = tensors["x"] * 1
    y = with_x(family.ours, case, tensors | {"x": x})[0]
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("again", [False, True])
def test_checkpoints(
    again: bool, python_calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One language computes the forward, and either computes it again."""
    case, tensors = made("plain")
    leaves = list(family.leaves(tensors).values())
    expected = torch.autograd.grad(with_x(family.ours, case, tensors)[0].sum(), leaves)
    for modules in ((node.module, lambda: None), (lambda: None, node.module)):
        first, second = modules if again else (modules[0], modules[0])
        monkeypatch.setattr(node, "module", first)
        y = checkpoints.checkpoint(
            lambda: with_x(family.ours, case, tensors)[0], use_reentrant=False
        )
        monkeypatch.setattr(node, "module", second)
        found = torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(found, expected)


def graphs_of(function: Call, *inputs: Tensor) -> tuple[Any, list[GraphModule]]:
    """Return results of a function whose calls AOTAutograd traces, and its graphs."""
    graphs = []

    def keep(module: GraphModule, _: list[Any]) -> Call:
        graphs.append(module)
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    following: Any = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    results = torch.compile(function, backend=following, fullgraph=True)(*inputs)
    return results, graphs


class Traced:
    """Calls that stay calls in Dynamo's graph, as those that the pass adds."""

    norm_linear = staticmethod(
        torch._dynamo.allow_in_graph(lambda *a, **k: fn.norm_linear(*a, **k))
    )


def chained(x: Tensor, weight: Tensor, call: Call) -> tuple[Tensor, ...]:
    u = torch.tanh(x)
    y, s = call(u, weight, return_sum=True)
    z, s = call(s, weight, return_sum=True, normalization="rms_norm")
    return y, z, s.exp()


def test_x_is_passed_on_in_traced_graphs() -> None:
    x, weight = torch.randn(2, 5, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    results, graphs = graphs_of(lambda *t: chained(*t, Traced.norm_linear), x, weight)
    found = torch.autograd.grad([r.sum() for r in results], [x, weight])
    others = chained(x, weight, fn.norm_linear)
    torch.testing.assert_close(results, others)
    expected = torch.autograd.grad([r.sum() for r in others], [x, weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    shapes = [n.meta["val"].shape for n in graphs[-1].graph.nodes if n.target is ADD]
    assert x.shape not in shapes
    # Not outside: x is what it was, and may be written.
    assert fn.norm_linear(x, weight, return_sum=True)[1] is x


def test_an_mlp_that_adds_x_in_a_traced_graph() -> None:
    case, tensors = made("plain")
    leaves = family.leaves(tensors)
    results, graphs = graphs_of(lambda: with_x(family.ours, case, tensors)[0])
    found = torch.autograd.grad(results.sum(), list(leaves.values()))
    expected = torch.autograd.grad(
        with_x(family.eager, case, tensors)[0].sum(), list(leaves.values())
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ADD not in [n.target for n in graphs[-1].graph.nodes]


def test_compiled_autograd(chain: str) -> None:
    case, tensors = made("returned")
    expected = gradients(with_x(family.eager, case, tensors)[:1], tensors)
    copies = family.replaced(tensors, as_copies)
    y = with_x(family.ours, case, copies)[0]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(dy.to(y.dtype))
    for name, leaf in family.leaves(copies).items():
        torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-4, atol=1e-4)


def test_many_gradients_at_once(chain: str) -> None:
    case, tensors = made("plain")
    leaves = list(family.leaves(tensors).values())
    dys = torch.randn(3, 2, 5, K)
    found, wanted = (
        torch.autograd.grad(y, leaves, dys, is_grads_batched=True)
        for y in (with_x(f, case, tensors)[0] for f in (family.ours, family.eager))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
