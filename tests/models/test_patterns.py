"""Each way to write a norm and what is around it: what it becomes, and that values stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compiling import with_sites
from patterns import Function, K, N, fused, llama, mlp, normed, parameters
from torch import Tensor


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


def test_a_pad_that_asks_for_the_device_reads_no_rows() -> None:
    """Regression, of Swin: under deterministic algorithms, `F.pad` leaves `x.is_xpu` in a graph."""

    def function(x: Tensor, g: Tensor, w: Tensor, c: Tensor) -> Tensor:
        return F.linear(F.pad(F.layer_norm(x, (K,), g), (0, 0, 0, 0)).view(-1, K), w, c)

    assert torch.are_deterministic_algorithms_enabled()
    (site,) = fused(function, parameters())
    assert site.fused, site.reason


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


def test_two_streams_whose_norms_keep_their_sums() -> None:
    """Regression, of CogVideoX: with a sum that wants gradients, the MLP's result lost its own."""

    def function(x, r, g, b, w, c, o, e):
        one, two = x + r, x[:, :2] + 2 * r[:, :2]
        z = torch.cat([normed(one, g, b), normed(two, g, b)], 1)
        h = F.linear(F.gelu(F.linear(z, w, c)), o, e)
        return one + 2 * h[:, :5], two * h[:, 5:]

    sites = fused(function, parameters())
    assert all(call.startswith("norm_mlp") for site in sites for call in site.calls)
    assert len(sites) == 2


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
