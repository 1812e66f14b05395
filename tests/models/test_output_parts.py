"""Linear layers whose output is read in parts: calls return the parts, and take their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_within_budget
from compiling import ITS_OWN_WARNINGS
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fused_norm as fn
from fused_norm.models import output_parts
from fused_norm.models.fuse import Options, fuse
from fused_norm.ops.output_parts import norm_linear_in_parts

pytestmark = ITS_OWN_WARNINGS

BATCH, ROWS, K, HEAD = 2, 8, 32, 64
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(output_parts, "splits_outputs", lambda *_: True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of rows before heads."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] > k.shape[1])
    return y.transpose(1, 2).flatten(2)


def heads(t: Tensor) -> Tensor:
    return t.unflatten(-1, (-1, HEAD))


def normed(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return F.layer_norm(x, (K,), p["g"], p.get("b"), 1e-5)


def projected(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return F.linear(normed(x, p), p["w"], p.get("c"))


def chunked(x, p):
    return attended(*map(heads, projected(x, p).chunk(3, -1)))


def split_in_heads(x, p):
    y = projected(x, p)
    b, t, _ = y.shape
    return attended(*y.view(b, t, -1, HEAD).split((2, 2, 2), 2))


def unbound(x, p):
    y = projected(x, p)
    q, k, v = y.reshape(*y.shape[:2], 3, 2, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def indexed(x, p):
    y = projected(x, p)
    y = y.reshape(*y.shape[:2], 3, 2, HEAD).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(y[0], y[1], y[-1]).transpose(1, 2).flatten(2)


def sliced(x, p):
    y, n = projected(x, p), 2 * HEAD
    return attended(*map(heads, (y[..., :n], y[:, :, n : 2 * n], y.narrow(-1, 2 * n, n))))


def grouped(x, p):
    """Queries of more heads than keys and values have, two of which are read twice."""
    y = projected(x, p)
    q, k, v = heads(y).split((2, 2, 2), -2)
    return attended(torch.cat([q, q], 2), k, v) + 0.5 * v.repeat(1, 1, 2, 1).flatten(2)


def two_parts(x, p):
    q, k = projected(x, p).split((2 * HEAD, 4 * HEAD), -1)
    return heads(q).transpose(1, 2) @ heads(k).permute(0, 2, 3, 1)[:, :2]


def unread(x, p):
    """Only the first and the last have a gradient."""
    q, _, v = projected(x, p).chunk(3, -1)
    return attended(heads(q), heads(q), heads(v))


def of_rms_norm(x, p):
    y = F.linear(F.rms_norm(x, (K,), p["g"], 1e-6), p["w"], p.get("c"))
    return attended(*map(heads, y.chunk(3, -1)))


def modulated(x, p):
    z = F.layer_norm(x, (K,)) * (1 + p["g"]) + p["b"]
    return attended(*map(heads, F.linear(z, p["w"]).chunk(3, -1)))


def of_a_sum(x, p):
    s = x + torch.tanh(x)
    return attended(*map(heads, projected(s, p).chunk(3, -1))), s


def passed_on(x, p):
    u = torch.tanh(x)
    return attended(*map(heads, projected(u, p).chunk(3, -1))), u.exp()


def with_its_rows(x, p):
    z = normed(x, p)
    return attended(*map(heads, F.linear(z, p["w"]).chunk(3, -1))), z * 2


def tied(x, p):
    """Two calls of one weight."""
    y = chunked(x, p)
    return y + attended(*map(heads, projected(torch.tanh(x), p).split(2 * HEAD, -1)))


def in_a_checkpoint(x, p):
    return checkpoint(lambda u: chunked(u, p) * 2, torch.tanh(x), use_reentrant=False)


def hooked_part(x, p):
    q, k, v = projected(x, p).chunk(3, -1)
    q.register_hook(lambda gradient: 2 * gradient)
    return attended(heads(q), heads(k), heads(v))


SPLIT: dict[Function, int] = {
    chunked: 3,
    split_in_heads: 3,
    unbound: 3,
    indexed: 3,
    sliced: 3,
    grouped: 3,
    two_parts: 2,
    unread: 3,
    of_rms_norm: 3,
    modulated: 3,
    of_a_sum: 3,
    passed_on: 3,
    with_its_rows: 3,
    tied: 3,
    in_a_checkpoint: 3,
    hooked_part: 3,
}


def read_elsewhere(x, p):
    y = projected(x, p)
    return attended(*map(heads, y.chunk(3, -1))) + y.mean()


def read_across_parts(x, p):
    y = projected(x, p)
    return attended(*map(heads, y.chunk(3, -1))), heads(y[..., HEAD : 3 * HEAD]).sum(-1)


def of_each_head(x, p):
    """As GPT-NeoX: queries, keys and values of each head are neighbors."""
    return attended(*projected(x, p).unflatten(-1, (2, 3 * HEAD)).chunk(3, -1))


def of_odd_sizes(x, p):
    q, k = projected(x, p).split((130, 254), -1)
    return attended(q[..., None, :], q[..., None, :], q[..., None, :]) + k[..., :130]


def of_small_parts(x, p):
    q, k, v = projected(x, p).split((HEAD, HEAD, 4 * HEAD), -1)
    return attended(heads(q), heads(k), heads(v)[:, :, :1])


def of_four_parts(x, p):
    q, k, v, g = projected(x, p).split((HEAD, HEAD, 2 * HEAD, 2 * HEAD), -1)
    return attended(heads(q), heads(k), heads(v)[:, :, :1]) * g[..., :HEAD]


def split_rows(x, p):
    q, k = projected(x, p).split(ROWS // 2, 1)
    return attended(heads(q), heads(k), heads(k))


def read_by_elements(x, p):
    """A gate that is no activation of a call."""
    a, b = projected(x, p).chunk(2, -1)
    return a * torch.sigmoid(b + 1)


def written_part(x, p):
    y = projected(x, p)
    q = y[..., : 2 * HEAD]
    q.mul_(2)
    return attended(*map(heads, (q, y[..., 2 * HEAD : 4 * HEAD], y[..., 4 * HEAD :])))


def returned_part(x, p):
    q, k, v = projected(x, p).chunk(3, -1)
    return attended(heads(q), heads(k), heads(v)), k


def split_without_gradients(x, p):
    y = projected(x, p)
    with torch.no_grad():
        q, k, v = y.chunk(3, -1)
    return attended(heads(q), heads(k), heads(v)) * x.sum()


def hooked(x, p):
    y = projected(x, p)
    y.register_hook(lambda gradient: 2 * gradient)
    return attended(*map(heads, y.chunk(3, -1)))


def transposed_weight(x, p):
    y = normed(x, p) @ p["v"]
    return attended(*map(heads, y.chunk(3, -1)))


WHOLE = (
    read_elsewhere,
    read_across_parts,
    of_each_head,
    of_odd_sizes,
    of_small_parts,
    of_four_parts,
    split_rows,
    read_by_elements,
    written_part,
    returned_part,
    split_without_gradients,
    hooked,
    transposed_weight,
)


def parameters(dtype: torch.dtype = torch.float32, bias: bool = True, rows: int = ROWS) -> Any:
    torch.manual_seed(0)
    shapes = {"g": (K,), "b": (K,), "w": (6 * HEAD, K), "c": (6 * HEAD,), "v": (K, 6 * HEAD)}
    p = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    p = {name: v.to(dtype).requires_grad_() for name, v in p.items() if bias or name != "c"}
    return torch.randn(BATCH, rows, K).to(dtype).requires_grad_(), p


def step(run: Function, x: Tensor, p: dict[str, Tensor]) -> list[Tensor | None]:
    """Return results, and gradients of all inputs."""
    results = run(x, p)
    results = list(results) if isinstance(results, tuple) else [results]
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in results]
    leaves = [x, *p.values()]
    pairs = [(y, dy) for y, dy in zip(results, dys, strict=True) if y.requires_grad]
    ys, dys = [y for y, _ in pairs], [dy for _, dy in pairs]
    return [*results, *torch.autograd.grad(ys, leaves, dys, allow_unused=True)]


def assert_alike(found: Any, expected: Any) -> None:
    """Compare tensors of float32 by the largest element of each."""
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert (mine.shape, mine.stride()) == (other.shape, other.stride())
            assert (mine - other).abs().max() <= 2e-5 * other.abs().max()


def compiled(
    run: Function, then: Any = None, fp8: str | None = None, **options: Any
) -> tuple[Function, list[int]]:
    """Return a compiled function, and the parts of its calls."""
    found: list[int] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        failures: list[str] = []
        sites = fuse(module, Options(fp8=fp8), failures)
        assert not failures
        assert all(site.fused for site in sites), sites
        for body in module.modules():
            if isinstance(body, GraphModule):
                calls = [n for n in body.graph.nodes if n.target is norm_linear_in_parts]
                found.extend(len(call.args[3]) for call in calls)
        return module.forward if then is None else then(module, inputs)

    return torch.compile(run, backend=backend, fullgraph=True, **options), found


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("run", SPLIT, ids=lambda run: run.__name__)
def test_split(run: Function, bias: bool) -> None:
    x, p = parameters(bias=bias)
    call, parts = compiled(run)
    assert_alike(step(call, x, p), step(run, x, p))
    assert set(parts) == {SPLIT[run]}


@pytest.mark.parametrize("run", WHOLE, ids=lambda run: run.__name__)
def test_whole(run: Function) -> None:
    x, p = parameters()
    call, parts = compiled(run)
    assert_alike(step(call, x, p), step(run, x, p))
    assert not parts


@pytest.mark.parametrize("run", SPLIT, ids=lambda run: run.__name__)
def test_traced(run: Function) -> None:
    """Graphs of AOTAutograd have no concatenation of gradients of parts."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[GraphModule] = []

    def keep(module: GraphModule, _: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module.forward)

    x, p = parameters()
    call, _ = compiled(run, aot_autograd(fw_compiler=keep, bw_compiler=keep))
    assert_alike(step(call, x, p), step(run, x, p))
    joined = [
        node
        for graph in graphs[1:]
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and isinstance(made := node.meta["val"], Tensor)
        and made.numel() == x.shape[:-1].numel() * 6 * HEAD
    ]
    assert not joined


@pytest.mark.parametrize("run", [chunked, split_in_heads, unbound])
def test_dynamic_batch(run: Function) -> None:
    call, parts = compiled(run)
    for rows in (ROWS, 11, 5):
        x, p = parameters(rows=rows)
        torch._dynamo.mark_dynamic(x, 1)
        assert_alike(step(call, x, p), step(run, x, p))
    assert parts == [3]


def test_narrow() -> None:
    x, p = parameters(torch.bfloat16)
    call, parts = compiled(unbound)
    found = step(call, x, p)
    assert parts == [3]
    wide = [t.detach().double().requires_grad_() for t in (x, *p.values())]
    exact = step(unbound, wide[0], dict(zip(p, wide[1:], strict=True)))
    names = ["y", "x", *p]
    for name, mine, other, truth in zip(names, found, step(unbound, x, p), exact, strict=True):
        if mine is not None and other is not None and truth is not None:
            assert_within_budget(name, mine, truth, other)


@pytest.mark.parametrize("why", ["frozen", "inference", "switched off", "autocast"])
def test_as_before(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, p = parameters()
    p["w"].requires_grad_(why != "frozen")
    if why == "switched off":
        monkeypatch.undo()
    call, parts = compiled(chunked)
    with (
        torch.set_grad_enabled(why != "inference"),
        torch.autocast("cpu", enabled=why == "autocast"),
    ):
        assert_alike([call(x, p)], [chunked(x, p)])
    assert not parts


def test_second_derivatives_and_inductor() -> None:
    x, p = parameters()
    call = torch.compile(unbound, backend="fused_norm", options={"small": True})
    assert_alike(step(call, x, p), step(unbound, x, p))

    def twice(run: Function) -> Any:
        p.pop("v", None)
        y = run(x, p).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, *p.values()])

    call, parts = compiled(split_products)
    found, expected = twice(call), twice(split_products)
    assert parts == [3]
    assert_alike(found, expected)


def split_products(x, p):
    q, k, v = projected(x, p).chunk(3, -1)
    return q @ k.transpose(1, 2) @ v


def test_explain_counts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    x, p = parameters()
    options = {"small": True}
    split = fn.explain(unbound, x, p, options=options)
    monkeypatch.setattr(output_parts, "splits_outputs", lambda *_: False)
    torch.compiler.reset()
    whole = fn.explain(unbound, x, p, options=options)
    (one,), (other,) = split.norms, whole.norms
    assert one.calls == ["norm_linear: 1 Linear, in 3 parts"]
    assert other.calls == ["norm_linear: 1 Linear"]
    for name in ("linears", "bytes_saved", "ops_before", "ops_after"):
        assert getattr(one, name) == getattr(other, name), name
