"""LayerNormLinear with all its options, LayerNormMLP: against the modules that they replace."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_norm as fn

K, N = 24, 16


def randomized(module: nn.Module) -> nn.Module:
    """Give every parameter values that a swap or an omission would show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def assert_alike(mine: nn.Module, theirs: Any, x: Tensor, *shared: Tensor) -> None:
    """Assert equal results, gradients of the input and of shared parameters."""
    results = []
    for call in (mine, theirs):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in shared)])
        for parameter in shared:
            parameter.grad = None
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(K), nn.LayerNorm(K, bias=False), nn.RMSNorm(K)], ids=repr
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_from_modules(norm: nn.Module, bias: bool, device: str) -> None:
    norm, linear = randomized(norm).to(device), nn.Linear(K, N, bias, device=device)
    layer = fn.LayerNormLinear.from_modules(norm, linear)
    shared = [*norm.parameters(), *linear.parameters()]
    assert {id(p) for p in layer.parameters()} == {id(p) for p in shared}
    x = torch.randn(5, K, device=device)
    assert_alike(layer, nn.Sequential(norm, linear), x, *shared)
    again = layer.to_modules()
    assert type(again[0]) is type(norm)
    assert_alike(layer, nn.Sequential(*again), x, *shared)


def test_parts_of_the_weight_from_modules_and_back(device: str) -> None:
    norm = randomized(nn.RMSNorm(K)).to(device)
    parts = {"query": nn.Linear(K, 8), "key": nn.Linear(K, 4), "value": nn.Linear(K, 4)}
    parts = {name: part.to(device) for name, part in parts.items()}
    layer = fn.LayerNormLinear.from_modules(norm, parts)
    assert list(layer.state_dict()) == [
        "layer_norm_weight",
        *("query_weight", "query_bias", "key_weight", "key_bias", "value_weight", "value_bias"),
    ]
    shared = [*norm.parameters(), *(p for part in parts.values() for p in part.parameters())]
    x = torch.randn(3, 5, K, device=device)
    assert_alike(layer, lambda x: torch.cat([p(norm(x)) for p in parts.values()], -1), x, *shared)
    _, again = layer.to_modules()
    assert {name: part.weight for name, part in again.items()} == {
        name: part.weight for name, part in parts.items()
    }


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", [nn.LayerNorm(K), nn.RMSNorm(K)], ids=repr)
def test_mlp_from_modules(norm: nn.Module, activation: str, device: str) -> None:
    halves = 2 if activation == "swiglu" else 1
    norm = randomized(norm).to(device)
    fc1, fc2 = nn.Linear(K, N * halves, device=device), nn.Linear(N, K, device=device)
    layer = fn.LayerNormMLP.from_modules(norm, fc1, fc2, activation=activation)

    def theirs(x: Tensor) -> Tensor:
        h = fc1(norm(x))
        if activation == "swiglu":
            gate, up = h.chunk(2, -1)
            return fc2(F.silu(gate) * up)
        return fc2(F.gelu(h))

    shared = [*norm.parameters(), *fc1.parameters(), *fc2.parameters()]
    assert {id(p) for p in layer.parameters()} == {id(p) for p in shared}
    x = torch.randn(5, K, device=device)
    assert_alike(layer, theirs, x, *shared)
    again = layer.to_modules()
    assert [type(m) for m in again] == [type(norm), nn.Linear, nn.Linear]
    for recompute in (False, True):
        layer.recompute = recompute
        assert_alike(lambda x: layer(x, x), lambda x: theirs(x) + x, x, *shared)


@pytest.mark.parametrize(
    "options",
    [
        {"normalization": "RMSNorm"},
        {"normalization": "RMSNorm", "eps": None},
        {"zero_centered_gamma": True},
        {"activation": "gelu_tanh"},
        {"activation": "geglu", "parameters_split": ("gate", "up")},
        {"parameters_split": {"q_": 8, "kv": 8}, "bias": False},
        {"elementwise_affine": False, "normalization": "RMSNorm"},
    ],
    ids=str,
)
def test_copies_compute_the_same(options: dict[str, Any], device: str) -> None:
    layer = randomized(fn.LayerNormLinear(K, N, device=device, **options))
    x = torch.randn(5, K, device=device)
    expected = layer(x)
    other = fn.LayerNormLinear(K, N, device=device, **options)
    other.load_state_dict(layer.state_dict())
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(same(x), expected)
    assert eval(f"fn.{layer!r}".replace("\n", " ")).state_dict().keys() == layer.state_dict().keys()


def test_initialization_is_pytorchs() -> None:
    torch.manual_seed(0)
    mine = fn.LayerNormMLP(K, N, activation="relu")
    torch.manual_seed(0)
    fc1, fc2 = nn.Linear(K, N), nn.Linear(N, K)
    for ours, theirs in zip(
        (mine.fc1_weight, mine.fc1_bias, mine.fc2_weight, mine.fc2_bias),
        (*fc1.parameters(), *fc2.parameters()),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(mine.layer_norm_weight, torch.ones(K))
    centered = fn.LayerNormLinear(K, N, zero_centered_gamma=True)
    assert torch.equal(centered.layer_norm_weight, torch.zeros(K))
    torch.testing.assert_close(
        centered(x := torch.randn(4, K)),
        F.linear(F.layer_norm(x, (K,)), centered.weight, centered.bias),
    )


def test_normalized_rows_are_returned(device: str) -> None:
    layer = fn.LayerNormLinear(K, N, return_layernorm_output=True, device=device)
    x = torch.randn(2, 5, K, device=device)
    y, z = layer(x)
    torch.testing.assert_close(z, F.layer_norm(x, (K,)))
    torch.testing.assert_close(y, F.linear(z, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [None, ("query", "key")])
def test_main_grads(parts: Any, device: str) -> None:
    options: dict[str, Any] = {"normalization": "RMSNorm", "parameters_split": parts}
    torch.manual_seed(0)
    plain = fn.LayerNormLinear(K, N, device=device, **options)
    layer = copy.deepcopy(plain)
    layer.fuse_wgrad_accumulation = True
    names = [name for name, _ in layer.named_parameters() if name.endswith("weight")][1:]
    for name in names:
        getattr(layer, name).main_grad = torch.ones_like(getattr(layer, name))
    x = torch.randn(7, K, device=device)
    plain(x).square().sum().backward()
    layer(x).square().sum().backward()
    for name in names:
        assert getattr(layer, name).grad is None
        torch.testing.assert_close(
            getattr(layer, name).main_grad, getattr(plain, name).grad + 1, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: fn.LayerNormLinear(K, N, normalization="rms"),
            ValueError,
            "('LayerNorm', 'RMSNorm')",
        ),
        (lambda: fn.LayerNormLinear(K, N, activation="elu"), ValueError, "'quick_gelu', 'silu'"),
        (lambda: fn.LayerNormMLP(K, N, activation="elu"), ValueError, "'quick_gelu', 'silu'"),
        (lambda: fn.LayerNormLinear(K, 7, activation="swiglu"), ValueError, "even out_features"),
        (lambda: fn.LayerNormLinear(K, N, None), TypeError, "needs an eps"),
        (lambda: fn.LayerNormLinear(K, N, parameters_split=("a", "b", "c")), ValueError, "3 parts"),
        (lambda: fn.LayerNormLinear(K, N, parameters_split={"a": 9}), ValueError, "up to 9"),
        (
            lambda: fn.LayerNormMLP.from_modules(nn.LayerNorm(K), nn.Linear(K, N), nn.Linear(K, N)),
            ValueError,
            "fc2 must take and return (16, 24)",
        ),
        (
            lambda: fn.LayerNormLinear(K, N, zero_centered_gamma=True).to_modules(),
            ValueError,
            "no gamma around zero",
        ),
    ],
)
def test_errors(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make()
