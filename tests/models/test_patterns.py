"""Each way to write a norm and what is around it: what it becomes, and that values stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weights import Wrapped

from fused_norm.models import Site, backend
from fused_norm.models.fuse import _keeps_a_gpu_busy

K, N = 24, 40
Function = Callable[..., Any]


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return what the functions below take: rows, and parameters of all sizes."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"x": (2, 5, K), "r": (2, 5, K), "g": (K,), "b": (K,), "w": (N, K), "v": (N, K)},
        **{"c": (N,), "d": (N,), "p": (2 * N, K), "o": (K, N), "e": (K,), "s": (2, K), "t": (2, K)},
    }
    found = {name: 0.5 * torch.randn(shape) for name, shape in shapes.items()}
    return {name: v.to(dtype).requires_grad_() for name, v in found.items()}


def run(function: Function, p: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return results and gradients of a function of some parameters by their names."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = {name: p[name].detach().clone().requires_grad_() for name in names}
    outputs = run.compiled(*given.values()) if run.compiled else function(*given.values())
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, dys)
    return outputs, {name: v.grad for name, v in given.items() if v.grad is not None}


run.compiled = None  # type: ignore[attr-defined]


def fused(function: Function, p: dict[str, Tensor], **options: Any) -> list[Site]:
    """Hold a function against itself compiled; return what became of its norms."""
    expected = run(function, p)
    run.compiled, sites = with_sites(function, True, **options)  # type: ignore[attr-defined]
    try:
        found = run(function, p)
    finally:
        run.compiled = None  # type: ignore[attr-defined]
    for a, b in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
    assert expected[1].keys() == found[1].keys()
    for name, a in expected[1].items():
        torch.testing.assert_close(found[1][name], a, rtol=1e-4, atol=1e-4, msg=name)
    return sites


def llama(x: Tensor, g: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return g * h.to(x.dtype)


def gemma(x: Tensor, g: Tensor) -> Tensor:
    h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + g.float())).type_as(x)


def t5(x: Tensor, g: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return g * (x * torch.rsqrt(variance + 1e-6))


def by_power(x: Tensor, g: Tensor) -> Tensor:
    return x * torch.pow((x * x).mean(-1, keepdim=True) + 1e-6, -0.5) * g


def by_root(x: Tensor, g: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * g


def nemotron(x: Tensor, g: Tensor) -> Tensor:
    return F.layer_norm(x, (K,), g + 1, g * 0.5, 1e-5)


def cohere(x: Tensor, g: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return g * ((x - mean) * torch.rsqrt(variance + 1e-5))


def by_variance(x: Tensor, g: Tensor) -> Tensor:
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return y * g


def olmo(x: Tensor, g: Tensor) -> Tensor:
    return F.layer_norm(x.to(torch.float32), (K,), None, None, eps=1e-5).to(x.dtype) * g


NORMS = [llama, gemma, t5, by_power, by_root, nemotron, cohere, by_variance, olmo]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norm_written_out(norm: Function) -> None:
    def function(x: Tensor, g: Tensor, w: Tensor, c: Tensor) -> Tensor:
        return F.linear(norm(x, g), w, c)

    (site,) = fused(function, parameters())
    assert site.fused, site.reason
    assert site.kind == ("layer_norm" if norm in NORMS[5:] else "rms_norm")


@pytest.mark.parametrize("norm", [llama, gemma, t5], ids=lambda norm: norm.__name__)
def test_bfloat16_is_no_less_exact(norm: Function) -> None:
    """Rounding once is nearer to the truth than the model's own rounding in between."""
    p = parameters(torch.bfloat16)

    def function(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(norm(x, g).to(x.dtype), w)

    compiled, sites = with_sites(function)
    given = (p["x"], p["g"], p["w"])
    exact = function(*(v.double() for v in given)) if norm is not gemma else None
    if exact is None:
        wide = [v.double() for v in given]
        h = wide[0] * torch.rsqrt(wide[0].pow(2).mean(-1, keepdim=True) + 1e-6)
        exact = F.linear(h * (1 + wide[1]), wide[2])
    own = (function(*given).double() - exact).norm()
    ours = (compiled(*given).double() - exact).norm()
    assert sites[0].fused, sites[0].reason
    assert ours <= 2 * own


def normed(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (K,), g, b, 1e-5)


def residual(x, r, g, b, w, c):
    s = x + r
    return F.linear(normed(s, g, b), w, c), s


def residual_in_place(x, r, g, b, w, c):
    s = x * 2
    s += r
    return F.linear(normed(s, g, b), w, c), s


def several(x, r, g, b, w, c, v):
    z = normed(x + r, g, b)
    return F.linear(z, w, c), F.linear(z, v)


def activation(x, g, b, w, c):
    return F.gelu(F.linear(normed(x, g, b), w, c), approximate="tanh")


def tanh_by_hand(x, g, b, w, c):
    h = F.linear(normed(x, g, b), w, c)
    return 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3.0))))


def quick_gelu(x, g, b, w, c):
    h = F.linear(normed(x, g, b), w, c)
    return h * torch.sigmoid(1.702 * h)


def gated(x, g, b, w, v):
    z = normed(x, g, b)
    return F.silu(F.linear(z, w)) * F.linear(z, v)


def gated_up_first(x, g, b, w, c, v, d):
    z = normed(x, g, b)
    return F.linear(z, v, d) * F.gelu(F.linear(z, w, c))


def packed_gate_first(x, g, b, p):
    gate, up = F.linear(normed(x, g, b), p).chunk(2, dim=-1)
    return F.silu(gate) * up


def packed_gate_last(x, g, b, p):
    up, gate = F.linear(normed(x, g, b), p).chunk(2, dim=-1)
    return up * F.gelu(gate)


def mlp(x, r, g, b, w, c, o, e):
    s = x + r
    h = F.relu(F.linear(normed(s, g, b), w, c))
    return F.linear(F.dropout(h, 0.0), o, e), s


def mlp_with_residual(x, g, b, w, c, o, e):
    return x + F.linear(F.gelu(F.linear(normed(x, g, b), w, c)), o, e)


def mlp_with_own_sum(x, r, g, b, w, c, o, e):
    s = x + r
    return s + F.linear(F.gelu(F.linear(normed(s, g, b), w, c)), o, e)


def dit(x, g, b, s, t, w, c):
    return F.linear(normed(x, g, b) * (1 + s[:, None]) + t[:, None], w, c)


def cogvideo(x, s, t, w, c):
    return F.linear(normed(x, None, None) * (1 + s)[:, None, :] + t[:, None, :], w, c)


def conv1d(x, g, b, w, c):
    rows = normed(x, g, b).view(-1, K)
    return torch.addmm(c, rows, w.t().contiguous()).view(2, 5, N)


def product(x, g, b, w):
    return normed(x, g, b) @ w.t()


def windows(x, g, b, w, c):
    z = normed(x, g, b).transpose(0, 1).reshape(5, 2, 1, K)
    return F.linear(z, w, c)


def first_row(x, g, b, w, c):
    return F.linear(normed(x, g, b)[:, 0], w, c)


def read_elsewhere(x, g, b, w, c):
    z = normed(x, g, b)
    return F.linear(z, w, c), z * 2


def transposed_and_added(x, g, b, w, c, o):
    z = normed(x, g, b)
    h = F.linear(z.transpose(0, 1), w, c)
    return z + F.linear(h.transpose(0, 1), o)


def with_shape(x, g, b, w, c):
    z = normed(x, g, b)
    return F.linear(z, w, c) + torch.zeros_like(z)[..., :1]


FORMS = {
    residual: "norm_linear: residual, 1 Linear",
    residual_in_place: "norm_linear: residual, 1 Linear",
    several: "norm_linear: residual, 2 Linear",
    activation: "norm_linear: gelu_tanh",
    tanh_by_hand: "norm_linear: gelu_tanh",
    quick_gelu: "norm_linear: quick_gelu",
    gated: "norm_linear: swiglu",
    gated_up_first: "norm_linear: geglu",
    packed_gate_first: "norm_linear: swiglu",
    packed_gate_last: "norm_linear: geglu",
    mlp: "norm_mlp: residual, relu",
    mlp_with_residual: "norm_mlp: gelu, residual after",
    mlp_with_own_sum: "norm_mlp: residual, gelu",
    dit: "norm_linear: modulation, 1 Linear",
    cogvideo: "norm_linear: modulation, 1 Linear",
    conv1d: "norm_linear: 1 Linear",
    product: "norm_linear: 1 Linear",
    windows: "norm_linear: 1 Linear",
    first_row: "norm_linear: 1 Linear",
    read_elsewhere: "norm_linear: 1 Linear",
    transposed_and_added: "norm_linear: 1 Linear",
    with_shape: "norm_linear: 1 Linear",
}


@pytest.mark.parametrize("function", FORMS, ids=lambda function: function.__name__)
def test_form(function: Function) -> None:
    (site,) = fused(function, parameters())
    assert site.fused, site.reason
    assert site.calls == [FORMS[function]]


def test_two_modulations_of_one_norm() -> None:
    def function(x, g, b, s, t, w, v):
        z = normed(x, g, b)
        return F.linear(z * (1 + s[:, None]), w), F.linear(z * (1 + t[:, None]), v)

    (site,) = fused(function, parameters())
    assert site.calls == ["norm_linear: modulation, 1 Linear"] * 2


def test_two_streams_through_one_mlp() -> None:
    """Rows that are concatenated for it and split again: each stream runs separately."""

    def function(x, r, g, b, w, c, o, e):
        z = torch.cat([normed(x, g, b), normed(r[:, :2], g, b)], 1)
        h = F.linear(F.dropout(F.gelu(F.linear(z, w, c)), 0.0), o, e)
        return x + h[:, :5], h[:, 5:]

    sites = fused(function, parameters())
    assert [site.calls for site in sites] == [
        ["norm_mlp: gelu, residual after"],
        ["norm_mlp: gelu"],
    ]


def test_two_streams_that_stay_together() -> None:
    def function(x, r, g, b, w, c, o, e):
        z = torch.cat([normed(x, g, b), normed(r[:, :2], g, b)], 1)
        h = F.linear(F.gelu(F.linear(z, w, c)), o, e)
        return h[:, :5], h[:, 4:]

    sites = fused(function, parameters())
    assert all("its rows in one tensor with those of others" in site.reason for site in sites)


def test_dynamic_shapes() -> None:
    p = parameters()
    compiled, sites = with_sites(mlp, dynamic=True)
    others = [p[name] for name in ("g", "b", "w", "c", "o", "e")]
    for rows in (3, 7, 11):
        x, r = torch.randn(2, rows, K), torch.randn(2, rows, K)
        found, expected = compiled(x, r, *others), mlp(x, r, *others)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert [site.fused for site in sites] == [True]


# What must stay as it is.


def written_between(x, w, c):
    s = (x * 1.5).detach()
    z = F.layer_norm(s, (K,))
    s.mul_(2)
    return F.linear(z, w, c) + s[..., :1]


def rows_written(x, g, b, w):
    z = normed(x, g, b)
    y = F.linear(z, w.detach())
    return y + z.mul_(2).sum(-1, keepdim=True)


def other_axis(x, w):
    return F.linear(x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6), w)


def beside_other_rows(x, r, g, b, w):
    return F.linear(torch.cat([normed(x, g, b), r], 1), w)


def beside_other_features(x, r, g, b, w):
    return F.linear(torch.cat([normed(x, g, b), r], -1), torch.cat([w, w], -1))


def no_linear(x, g, b):
    return normed(x, g, b).sin()


def product_of_activations(x, g, b, r):
    return normed(x, g, b) @ r.mT


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (written_between, "an operand is written in between"),
        (rows_written, "written in place"),
        (other_axis, None),
        (beside_other_rows, "its rows in one tensor with those of others"),
        (beside_other_features, "in one row with other features"),
        (no_linear, "output read by no Linear: sin"),
        (product_of_activations, "output read by no Linear: matmul"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_left_as_it_is(function: Function, reason: str | None) -> None:
    sites = fused(function, parameters())
    if reason is None:
        assert not sites
    else:
        assert reason in sites[0].reason


def test_squared_relu_is_no_relu() -> None:
    def function(x, g, b, w, c):
        return F.relu(F.linear(normed(x, g, b), w, c)).square()

    (site,) = fused(function, parameters())
    assert site.calls == ["norm_linear: 1 Linear"]


def test_dropout_in_training_stays() -> None:
    def function(x, g, b, w, c):
        return F.linear(F.dropout(normed(x, g, b), 0.5, True), w, c)

    p = parameters()
    compiled, sites = with_sites(function)
    compiled(p["x"], p["g"], p["b"], p["w"], p["c"])
    assert "dropout" in sites[0].reason


def test_rounding_of_the_model_is_kept() -> None:
    def function(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(llama(x, g), w)

    p = parameters(torch.bfloat16)
    given = (p["x"], p["g"], p["w"])
    for rounding, is_fused in (("once", True), ("model", False)):
        compiled, sites = with_sites(function, rounding=rounding)
        y = compiled(*given)
        assert sites[0].fused is is_fused
        if rounding == "model":
            torch.testing.assert_close(y, function(*given), rtol=0, atol=0)
    with pytest.raises(ValueError, match="rounding must be"):
        backend(None, [], options={"rounding": "twice"})  # type: ignore[arg-type]


def test_autocast_inside_the_graph() -> None:
    def function(x, r, g, b, w, c, v):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(normed(x, g, b), w, c)
        return y.float() + F.linear(normed(r, g, b), v)

    p = parameters()
    compiled, sites = with_sites(function)
    given = [p[name] for name in ("x", "r", "g", "b", "w", "c", "v")]
    y, expected = compiled(*given), function(*given)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert all(site.fused for site in sites), sites


def test_autocast_around() -> None:
    def function(x, g, b, w, c, o, e):
        return F.linear(F.gelu(F.linear(normed(x, g, b), w, c)), o, e)

    p = parameters()
    given = [p[name] for name in ("x", "g", "b", "w", "c", "o", "e")]
    compiled, sites = with_sites(function)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(*given), function(*given)
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
    assert sites[0].fused, sites[0].reason


@pytest.mark.pass_fails
def test_a_pass_that_fails_leaves_the_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("fused_norm.models.rewrite.Rewriter._swap", fail)
    with caplog.at_level(logging.WARNING, "fused_norm.models"):
        assert fused(mlp, parameters()) == []
    assert "a graph runs unchanged because the pass failed: KeyError" in caplog.text


def test_a_vmap_in_the_graph() -> None:
    """Regression, of Falcon Mamba: a batch has no storage to ask for, and the pass failed."""

    def function(x, g, b, w, c):
        return F.linear(normed(x, g, b), w, c) + torch.vmap(lambda row: row.sum())(x)[:, None, None]

    (site,) = fused(function, parameters())
    assert site.fused, site.reason


class Int8Tensor(Wrapped):
    """One with ops of its own."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Int8Tensor:
        return Wrapped.__new__(cls, values, torch.float32)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Int8Tensor:
        return Int8Tensor(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        def plain(each: Any) -> Any:
            return each.values.float() if isinstance(each, cls) else each

        return function(*map(plain, args), **(kwargs or {}))


def test_subclasses_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda x, weight: True)
    values = torch.randint(-9, 9, (N, K), dtype=torch.int8)
    compiled, sites = with_sites(lambda x, w, r: r + F.linear(F.layer_norm(x, (K,)), w))
    x, r = torch.randn(3, K), torch.randn(3, N)
    y = compiled(x, Int8Tensor(values), r)
    assert [site.reason for site in sites] == ["weight is a subclass: Int8Tensor"]
    torch.testing.assert_close(y, r + F.linear(F.layer_norm(x, (K,)), values.float()))


@pytest.mark.filterwarnings("ignore")
def test_int8_weights_of_torchao_are_left() -> None:
    """Their products are torchao's; a norm that a Linear layer of floats reads is fused."""
    quantization = pytest.importorskip("torchao.quantization")
    norms, linears = torch.nn.LayerNorm, torch.nn.Linear
    model = torch.nn.Sequential(norms(K), linears(K, K), norms(K), linears(K, N)).eval()
    quantization.quantize_(
        model,
        quantization.Int8WeightOnlyConfig(version=2),
        filter_fn=lambda module, name: name == "1",
    )
    compiled, sites = with_sites(model, small=True)
    x = torch.randn(3, K)
    with torch.no_grad():
        y = compiled(x)
        torch.testing.assert_close(y, model(x))
    assert [site.fused for site in sites] == [False, True]
    assert sites[0].reason == "weight is a subclass: Int8Tensor"


def test_small_calls_can_be_left() -> None:
    (site,) = fused(mlp, parameters(), small=False)
    assert "are faster for a call this small" in site.reason


@pytest.mark.parametrize(
    ("width", "grad", "is_busy"),
    [(1024, False, True), (512, False, False), (2048, True, True), (1024, True, False)],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_busy_gpu_hides_small_calls(
    device: str, width: int, grad: bool, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 x 4096 x 1024 x 4096 products behind one norm, or a quarter of them; no GPU is needed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def function(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
        y = F.linear(F.layer_norm(x, (width,)), w)
        return torch.addmm(x, F.gelu(y), o)

    graph = torch.fx.symbolic_trace(function).graph
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        x = torch.empty(4096, width, device=device, requires_grad=grad)
        w = torch.empty(4 * width, width, device=device)
        values = {"x": x, "w": w, "o": w, "linear": torch.empty(4096, 4 * width, device=device)}
        values |= {"layer_norm": x, "gelu": values["linear"], "addmm": x}
        for node in graph.nodes:
            if node.op != "output":
                node.meta["example_value"] = values[node.name]
        assert _keeps_a_gpu_busy(graph) == (is_busy and device == "cuda")


def attention_and_mlp(x, g, b, w, c, o, e, d):
    """Both sums of a block: one that a norm reads, and one after an MLP."""
    s = x + F.linear(torch.tanh(F.linear(normed(x, g, b), w, c)), o, e)
    s = s + F.linear(F.gelu(F.linear(normed(s, g, b), w, d)), o)
    return F.linear(normed(s, g, b), w), s


def sum_in_place(x, w, o, r):
    s = r * 2
    s += F.linear(F.linear(x, w), o)
    return s


def layer_read_twice(x, w, o, e, v):
    h = F.linear(F.linear(x, w), o, e)
    return x + h, F.linear(h, v)


def of_two_layers(x, w, c, o, e):
    return F.linear(F.linear(x, w, c), o) + F.linear(F.linear(x, w), o, e)


def layer_on_a_norm(x, r, g, b, w, c, o):
    s = torch.cat([r, r], -1)[..., :N] + F.linear(normed(x, g, b), w, c)
    return F.linear(F.layer_norm(s, (N,)), o), s


def written_before_the_sum(x, w, r):
    a = (x * 1.5).detach()
    h = F.linear(a, w.detach())
    a.mul_(2)
    return torch.cat([r, r], -1)[..., :N] + h, a * r


@pytest.mark.parametrize(
    ("function", "sums", "calls"),
    [
        (
            attention_and_mlp,
            1,
            ["norm_linear: 1 Linear", "norm_mlp: gelu, residual after", "norm_linear: 1 Linear"],
        ),
        (sum_in_place, 1, []),
        (layer_read_twice, 0, []),
        (of_two_layers, 1, []),
        (layer_on_a_norm, 0, ["norm_linear: 1 Linear", "norm_linear: residual, 1 Linear"]),
        (written_before_the_sum, 0, []),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_sums_that_products_add(
    monkeypatch: pytest.MonkeyPatch, function: Function, sums: int, calls: list[str]
) -> None:
    """As on a device whose products add a residual at no cost."""
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda x, weight: True)
    monkeypatch.setattr("fused_norm.ops.linear_add.may_multiply", lambda *_: True)
    monkeypatch.setattr("fused_norm.ops.linear_add.is_small", lambda *_: False)
    sites = fused(function, parameters())
    assert [call for site in sites for call in site.calls] == calls + ["linear_add"] * sums
    left = fused(function, parameters(), small=False)
    assert not any(site.fused for site in left)


def test_sums_keep_the_rounding_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_norm.models.fuse.adds_in_product", lambda x, weight: True)
    p = parameters(torch.bfloat16)
    for rounding, count in (("once", 1), ("model", 0)):
        compiled, sites = with_sites(sum_in_place, rounding=rounding)
        compiled(p["x"], p["w"], p["o"], p["r"])
        assert len(sites) == count
