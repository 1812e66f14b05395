"""Readers of a norm's input that read it through the call, whose backward adds their gradients."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from functorch.compile import make_boxed_func
from patterns import Function, K, fused, llama, normed, parameters, run
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fused_norm.models.fuse import Options, fuse

ADD = torch.ops.aten.add.Tensor


def vit(x, g, b, w, c, o, e, d):
    u = torch.tanh(x)
    s = u + F.linear(torch.tanh(F.linear(normed(u, g, b), w, c)), o, e)
    return s + F.linear(F.gelu(F.linear(normed(s, g, b), w, d)), o, e)


def llama_block(x, g, b, w, v, p, o, e):
    u = torch.tanh(x)
    s = u + F.linear(torch.tanh(F.linear(llama(u, g), w)), o)
    z = llama(s, b)
    return s + F.linear(F.silu(F.linear(z, w)) * F.linear(z, v), o)


def two_norms(x, g, b, w, c, v, d):
    u = torch.tanh(x)
    return F.linear(normed(u, g, b), w, c), F.linear(F.layer_norm(u, (K,), b, g), v, d), u.exp()


def two_written_norms(x, g, b, w, c, v, d):
    u = torch.tanh(x)
    return F.linear(llama(u, g), w, c), F.linear(llama(u, b), v, d), u.exp()


def norm_that_stays(x, g, b, w):
    u = torch.tanh(x)
    return F.linear(normed(u, g, b), w), torch.tanh(normed(u, b, g)), u.exp()


def in_a_checkpoint(x, g, b, w, o):
    def body(u):
        return u + F.linear(torch.tanh(F.linear(normed(u, g, b), w)), o)

    return checkpoint(body, torch.tanh(x), use_reentrant=False)


def input_of_the_graph(x, g, b, w):
    return F.linear(normed(x, g, b), w), x.exp(), x


def returned_rows(x, g, b, w):
    u = torch.tanh(x)
    z = normed(u, g, b)
    return F.linear(z, w), z * 2, u.exp()


def read_transposed(x, g, b, w):
    u = torch.tanh(x.transpose(0, 1))
    return F.linear(normed(u, g, b), w), u.transpose(0, 1).view(-1)


def read_before(x, g, b, w):
    u = torch.tanh(x)
    t = u.exp().sum()
    return F.linear(normed(u, g, b), w) + t, u.sin()


def read_without_gradients(x, g, b, w):
    u = torch.tanh(x)
    y = F.linear(normed(u, g, b), w)
    with torch.no_grad():
        t = u.exp()
    return y, t * x, u.detach() * x


def norm_without_gradients(x, g, b, w):
    u = torch.tanh(x)
    with torch.no_grad():
        y = F.linear(normed(u, g, b), w)
    return y * x.sum(), u.exp()


def read_for_its_size(x, g, b, w):
    u = torch.tanh(x)
    return F.linear(normed(u, g, b), w) * u.shape[1], x


def written_later(x, g, b, w):
    u = x * 2
    y = F.linear(normed(u, g, b), w).detach()
    t = u + 2
    u += 1
    return y * x.sum(), t, u * 3


def view_written_later(x, g, b, w):
    u = x * 2
    v = u.view(-1)
    y = F.linear(normed(u, g, b), w).detach()
    t = u + 2
    v += 1
    return y * x.sum(), t, u * 3


def hooked(x, g, b, w):
    u = torch.tanh(x)
    y = F.linear(normed(u, g, b), w)
    u.register_hook(lambda gradient: 2 * gradient)
    return y, u.exp()


def sum_of_two_calls(x, r, g, b, w, v, s, t):
    u = x + torch.tanh(r)
    z, s, t = normed(u, g, b), s.unsqueeze(1), t.unsqueeze(1)
    return F.linear(z * (1 + s) + t, w), F.linear(z * (1 + t) + s, v), u, u.exp()


PASSED: dict[Function, int] = {
    vit: 1,
    llama_block: 1,
    two_norms: 2,
    two_written_norms: 2,
    norm_that_stays: 1,
    in_a_checkpoint: 1,
    input_of_the_graph: 1,
    returned_rows: 1,
    read_transposed: 1,
}
# These norms are not fused at all: the backward needs their input.
WRITTEN = (written_later, view_written_later)
LEFT = (
    read_before,
    read_without_gradients,
    norm_without_gradients,
    read_for_its_size,
    sum_of_two_calls,
    *WRITTEN,
    # Elsewhere Dynamo breaks the graph there.
    *([hooked] if find_spec("torch._higher_order_ops.register_hook") else []),
)


def traced(
    function: Function, p: dict[str, Tensor], fuses: bool = True
) -> tuple[list[GraphModule], list[GraphModule]]:
    """Return the graphs that the pass made, and those that AOTAutograd made of them."""
    made, graphs = [], []

    def keep(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module)
        return make_boxed_func(module.forward)

    following: Any = aot_autograd(fw_compiler=keep, bw_compiler=keep)

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        if fuses:
            fuse(module, Options(small=True))
        made.extend(each for each in module.modules() if isinstance(each, GraphModule))
        return following(module, inputs)

    torch._dynamo.reset()
    run.compiled = torch.compile(function, backend=backend)  # type: ignore[attr-defined]
    try:
        run(function, p)
    finally:
        run.compiled = None  # type: ignore[attr-defined]
    return made, graphs


def passing(graphs: list[GraphModule]) -> int:
    """Return how many calls return the input of their norm."""
    return sum(
        bool(node.kwargs.get("return_sum")) and node.kwargs.get("residual") is None
        for graph in graphs
        for node in graph.graph.nodes
    )


def adds(graphs: list[GraphModule]) -> int:
    """Return how many kernels the backward has that add tensors of the shape of x."""
    return sum(
        node.target is ADD and node.meta["val"].dim() == 3 for node in graphs[-1].graph.nodes
    )


@pytest.mark.parametrize("then", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [*PASSED, *LEFT], ids=lambda each: each.__name__)
def test_values_and_gradients(function: Function, then: str) -> None:
    sites = fused(function, parameters(), then=then, small=True)
    assert any(site.fused for site in sites) == (function not in WRITTEN)


@pytest.mark.parametrize("function", PASSED, ids=lambda each: each.__name__)
def test_norms_add_gradients_of_their_input(
    monkeypatch: pytest.MonkeyPatch, function: Function
) -> None:
    p = parameters()
    made, graphs = traced(function, p)
    assert passing(made) == PASSED[function]
    monkeypatch.setattr("fused_norm.models.rewrite.Rewriter._passes_on", lambda *_: False)
    others = traced(function, p)
    assert passing(others[0]) == 0
    assert adds(graphs) <= adds(others[1]) - PASSED[function]


@pytest.mark.parametrize("function", LEFT, ids=lambda each: each.__name__)
def test_what_is_not_read_through_a_call(function: Function) -> None:
    made, _ = traced(function, parameters())
    assert passing(made) == 0


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="not traced by this PyTorch"
)
def test_derivatives_that_the_graph_takes() -> None:
    def function(x, g, b, w):  # type: ignore[no-untyped-def]
        u = torch.tanh(x)
        y = F.linear(normed(u, g, b), w)
        total = u.exp().sum() + y.square().sum()
        return torch.autograd.grad(total, u, create_graph=True)[0].detach() * x, y

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert fused(function, parameters(), then="aot_eager", small=True)[0].fused


def test_no_sum_is_computed_twice() -> None:
    made, _ = traced(sum_of_two_calls, parameters())
    calls = [node for node in made[0].graph.nodes if "norm_linear" in str(node.target)]
    assert [bool(call.kwargs.get("return_sum")) for call in calls] == [True, False]
    # Its sum is the first call's.
    assert not [node for node in made[0].graph.nodes if node.target is torch.add]


@pytest.mark.parametrize("small", [(0, 5, K), (2, 0, K)], ids=str)
@pytest.mark.parametrize("then", ["aot_eager", "inductor"])
def test_without_rows(small: tuple[int, ...], then: str) -> None:
    p = parameters() | {"x": torch.randn(small)}
    fused(input_of_the_graph, p, then=then, small=True)


@pytest.mark.parametrize("function", [vit, two_written_norms], ids=lambda each: each.__name__)
def test_with_any_number_of_rows(function: Function) -> None:
    compiled, _ = with_sites(function, True, True, then="aot_eager", small=True)
    for shape in ((2, 5, K), (3, 7, K)):
        p = parameters() | {"x": torch.randn(shape)}
        expected = run(function, p)
        run.compiled = compiled  # type: ignore[attr-defined]
        try:
            found = run(function, p)
        finally:
            run.compiled = None  # type: ignore[attr-defined]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Double(nn.Module):
    """A block whose MLP adds the sum that it normalizes, before another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(K) for _ in range(2))
        self.up, self.down, self.last = nn.Linear(K, 2 * K), nn.Linear(2 * K, K), nn.Linear(K, 7)

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        s = s + self.down(F.relu(self.up(self.norms[0](s))))
        return self.last(self.norms[1](s)), s


def test_a_sum_that_a_call_cannot_add_is_the_next_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose products add a residual at no cost."""
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda x, weight: True)
    model, x, r = Double(), torch.randn(2, 5, K), torch.randn(2, 5, K)
    compiled, sites = with_sites(model, True)
    torch.testing.assert_close(compiled(x, r), model(x, r))
    assert [call for site in sites for call in site.calls] == [
        "norm_mlp: residual, relu",
        "norm_linear: residual, 1 Linear",
    ]
