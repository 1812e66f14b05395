"""Norms as models write them out: each as in the model that has it, against float64 and itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_within_budget
from compiling import with_sites
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.models import backend

K, N = 24, 40


class Written(nn.Module):
    """A norm and its parameters."""

    kind = "rms_norm"

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + 0.3 * torch.randn(K))
        self.beta = nn.Parameter(0.3 * torch.randn(K))


class ByNormalize(Written):
    """lucidrains' RMSNorm: x-transformers, imagen, vit-pytorch."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * K**0.5 * self.gamma


class GammaAroundZero(Written):
    """Of lucidrains' transfusion."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * K**0.5 * (self.gamma + 1.0)


class ScaleNorm(Written):
    """Nguyen and Salazar's: one number for gamma."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor([K**0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.norm(x, dim=-1, keepdim=True).clamp(min=1e-5) * self.g


class ByLength(Written):
    """A cosine similarity's rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


class ByVectorNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) * self.gamma


class BySum(Written):
    """Gated DeltaNet's norm of q and k."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class ByVarMean(Written):
    """timm's and Flax' fast variance."""

    kind = "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-1, unbiased=False, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.gamma + self.beta


class ByUnbiasedVariance(Written):
    kind = "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5) * self.gamma


class ByDeviation(Written):
    kind = "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * self.gamma + self.beta


class BySquaredDeviation(Written):
    """BERT-pytorch's, with eps within the root."""

    kind = "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, unbiased=False)
        return self.gamma * (x - mean) / (std**2 + 1e-6).sqrt() + self.beta


class ScaledAfter(Written):
    """T5's last norm before its tied head."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (K,), self.gamma, 1e-6) * K**-0.5


class OneGroup(Written):
    """GroupNorm of one group, as a LayerNorm of vectors."""

    kind = "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.flatten(0, -2), 1, self.gamma, self.beta, 1e-5).view(x.shape)


FORMS = [
    *(ByNormalize, GammaAroundZero, ScaleNorm, ByLength, ByVectorNorm, BySum, ByVarMean),
    *(ByUnbiasedVariance, ByDeviation, BySquaredDeviation, ScaledAfter, OneGroup),
]


class Layer(nn.Module):
    """A norm with what surrounds it in a model."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(K, N)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x + r)))


def step(layer: nn.Module, compiled: Any, given: list[Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Return the result and all gradients."""
    layer.zero_grad(set_to_none=True)
    inputs = [t.detach().clone().requires_grad_() for t in given]
    y = compiled(*inputs)
    y.backward(dy)
    found = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": inputs[0].grad, "r": inputs[1].grad, **found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("norm", FORMS, ids=lambda norm: norm.__name__)
def test_form(norm: type[Written], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(norm()).to(dtype)
    given = [torch.randn(2, 65, K).to(dtype) for _ in range(2)]
    dy = torch.randn(2, 65, N).to(dtype)
    compiled, sites = with_sites(layer)
    found = step(layer, compiled, given, dy)
    (site,) = sites
    assert site.fused, site.reason
    assert site.kind == norm.kind
    own = step(layer, layer, given, dy)
    wide = copy.deepcopy(layer).double()
    truth = step(wide, wide, [t.double() for t in given], dy.double())
    assert found.keys() == own.keys() == truth.keys()
    for name, exact in truth.items():
        assert found[name].dtype is own[name].dtype
        assert_within_budget(name, found[name], exact, own[name])


@pytest.mark.parametrize("norm", FORMS, ids=lambda norm: norm.__name__)
def test_form_exported(norm: type[Written]) -> None:
    torch.manual_seed(0)
    layer = Layer(norm())
    given = (torch.randn(2, 65, K), torch.randn(2, 65, K))
    with torch.no_grad():
        program = torch.export.export(layer, given)
        found = fn.optimize(program)
        assert any("fused_norm" in str(node.target) for node in found.graph.nodes)
        torch.testing.assert_close(found.module()(*given), layer(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("norm", [ByNormalize, ByVarMean, BySum])
def test_rounding_of_the_model_is_kept(norm: type[Written]) -> None:
    layer = Layer(norm()).to(torch.bfloat16)
    given = [torch.randn(2, 5, K).to(torch.bfloat16) for _ in range(2)]
    (site,) = fn.explain(layer, *given, options={"rounding": "model", "then": "eager"}).sites
    assert "rounded between the norm" in site.reason


def test_rows_of_zeros_stay_zeros() -> None:
    layer = Layer(ByNormalize())
    compiled = torch.compile(layer, backend=backend, options={"then": "eager"})
    x = torch.zeros(2, 5, K)
    torch.testing.assert_close(compiled(x, x), layer(x, x), rtol=0, atol=1e-6)


def test_one_root_of_two_norms() -> None:
    """Its reciprocal is read twice: by rows for one layer, and with another gamma for another."""

    def function(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return F.linear(x * rstd * g, w), F.linear(x * rstd * (1 + g), v), rstd

    given = [torch.randn(s, requires_grad=True) for s in ((2, 5, K), (K,), (N, K), (N, K))]
    compiled, sites = with_sites(function)
    results = []
    for each in (function, compiled):
        ys = each(*given)
        grads = torch.autograd.grad([y.sum() for y in ys], given)
        results.append([*ys, *grads])
    assert [site.fused for site in sites] == [True, True]
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_lengths_of_sums_that_are_read_again() -> None:
    """A call returns the sum, and takes a gamma that the model has not."""

    def function(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        total = x + r
        return F.linear(F.normalize(total, dim=-1), w), total

    given = [torch.randn(s, requires_grad=True) for s in ((2, 5, K), (2, 5, K), (N, K))]
    compiled, sites = with_sites(function)
    results = []
    for each in (function, compiled):
        ys = each(*given)
        results.append([*ys, *torch.autograd.grad([y.square().sum() for y in ys], given)])
    assert [site.fused for site in sites] == [True]
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_eps_that_is_added_to_a_root_is_another_norm() -> None:
    """The Annotated Transformer's: no variance plus eps has that root for every row."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6), w)

    (site,) = fn.explain(function, torch.randn(5, K), torch.randn(N, K)).sites
    assert site.reason == "its eps is added to the root"
