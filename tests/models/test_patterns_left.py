"""What must stay as it is, and what the pass says of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from patterns import Function, K, N, fused, llama, mlp, normed, parameters
from small_model import SMALL, Model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weights import Wrapped

from fused_norm.models import backend
from fused_norm.models.fuse import _keeps_a_gpu_busy


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


@pytest.mark.pass_fails
def test_what_a_failed_pass_leaves_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: AOTAutograd asks of each input where Dynamo found it."""

    def fail(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("fused_norm.models.rewrite.Rewriter._swap", fail)
    model, x = Model(), torch.randn(2, 9, 32)
    y = torch.compile(model, backend="fused_norm", options=SMALL)(x)
    torch.testing.assert_close(y, model(x))


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
