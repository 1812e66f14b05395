"""The op family on a GPU's streams, in CUDA graphs, and compiled with them."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from compiling import ITS_OWN_WARNINGS
from processes import assert_is_captured
from torch import Tensor, nn

import fused_norm as fn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    *ITS_OWN_WARNINGS,
]

K, N = 256, 128


class AdaLN(nn.Module):
    """A residual and a modulation by sample, before q, k and v."""

    def __init__(self, **kind: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterList(0.05 * torch.randn(n, K, **kind) for n in (N, 64, 64))
        self.modulation = nn.Parameter(0.1 * torch.randn(2, 4, 1, K, **kind))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.modulation
        options: dict[str, Any] = {"scale": scale, "shift": shift, "return_sum": True}
        ys, total = fn.norm_linear(x, list(self.weights), residual=x.flip(0), **options)
        return torch.cat([*ys, total], -1)


class LinearAdd(nn.Module):
    """A Linear layer whose sum leaves its statistics to the norm after it."""

    def __init__(self, **kind: Any) -> None:
        super().__init__()
        self.first = nn.Linear(K, K, **kind)
        self.second = nn.Linear(K, N, **kind)

    def forward(self, x: Tensor) -> Tensor:
        total, statistics = fn.linear_add(
            x, self.first.weight, self.first.bias, x, normalization="rms_norm"
        )
        return fn.norm_linear(
            total,
            self.second.weight,
            self.second.bias,
            normalization="rms_norm",
            statistics=statistics,
        )


MEMBERS: dict[str, Any] = {
    "RMSNorm": lambda **kind: fn.LayerNormLinear(K, N, normalization="RMSNorm", **kind),
    "parts": lambda **kind: fn.LayerNormLinear(
        K, N, normalization="RMSNorm", parameters_split=("query", "key"), **kind
    ),
    "gate": lambda **kind: fn.LayerNormLinear(K, N, activation="swiglu", **kind),
    "MLP": lambda **kind: fn.LayerNormMLP(K, N, **kind),
    "recomputed MLP": lambda **kind: fn.LayerNormMLP(
        K, N, normalization="RMSNorm", activation="geglu", recompute=True, **kind
    ),
    "AdaLN": AdaLN,
    "linear_add": LinearAdd,
}


def make(member: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Tensor]:
    layer = MEMBERS[member](device="cuda", dtype=dtype)
    return layer, torch.randn(4, 16, K, device="cuda", dtype=dtype, requires_grad=True)


def step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the results and gradients of a step from the start."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    y = layer(x)
    y.backward(torch.ones_like(y).cumsum(-1) / y.shape[-1])
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


# Of the leaves, which first met gradients on the side stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("member", MEMBERS)
def test_cuda_graph(member: str) -> None:
    """A replay reads what is there now: to the bit what a newly captured graph computes.

    A launch may take PyTorch's products, where a call is over before Python has begun it and a
    graph takes kernels, so it agrees to rounding.
    """
    layer, x = make(member)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(side)

    def replay_of(new: bool) -> list[Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = step(layer, x)
        if new:
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
        graph.replay()
        return [t.clone() for t in captured]

    replayed, anew = replay_of(True), replay_of(False)
    for mine, again, launched in zip(replayed, anew, step(layer, x), strict=True):
        assert torch.equal(mine, again)
        assert (mine - launched).norm() <= 4e-3 * launched.norm()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("member", MEMBERS)
def test_graphed_callable_trains(member: str) -> None:
    """What the guide shows: forward and backward are replays, and read what is there then."""
    gc.collect()  # Graphs of earlier callables must not be freed during a capture.
    layer, x = make(member)
    twin = copy.deepcopy(layer)  # The callable is the module itself, with another forward.
    graphed = torch.cuda.make_graphed_callables(layer, (torch.randn_like(x, requires_grad=True),))
    for mine, launched in zip(step(graphed, x), step(twin, x), strict=True):
        assert (mine - launched).norm() <= 4e-3 * launched.norm()


@pytest.mark.parametrize("member", MEMBERS)
def test_side_stream_follows_its_producer(member: str) -> None:
    layer, x = make(member)
    expected = step(layer, x)
    source = x.detach().clone()
    with torch.no_grad():
        x.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            x.copy_(source)
        leaf = x.detach().requires_grad_()
        parameters = list(layer.parameters())
        y = layer(leaf)
        dy = torch.ones_like(y).cumsum(-1) / y.shape[-1]
        found = [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], dy)]
    side.synchronize()
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


# PyTorch captures an empty graph of its own to begin with.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("member", ["parts", "MLP", "AdaLN"])
def test_reduce_overhead(member: str) -> None:
    layer, _ = make(member, torch.float32)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(4, 16, K, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)


def test_cuda_graph_of_nothing_else() -> None:
    """Warmed up as PyTorch asks, in a process without another product of matrices."""
    options = 'activation="swiglu", device="cuda", dtype=torch.bfloat16'
    assert_is_captured(f"fn.LayerNormMLP(256, 128, {options})")


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_calls_that_repeat(activation: str | None, pair: bool, bias: bool) -> None:
    """Inference keeps what it made of the weights, until they change, and so does a graph."""
    if pair and activation != "swiglu":
        pytest.skip("one weight")
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    halves = 2 if activation == "swiglu" else 1
    x, gamma = torch.randn(2048, K, **kind) + 1, 1 + 0.1 * torch.randn(K, **kind)
    packed = 0.05 * torch.randn(halves * N, K, **kind)
    packed_bias = torch.randn(halves * N, **kind) if bias else None
    weight: Any = list(packed.clone().chunk(2)) if pair else packed
    biases: Any = packed_bias
    if pair and packed_bias is not None:
        biases = list(packed_bias.clone().chunk(2))

    def call() -> Tensor:
        return fn.norm_linear(x, weight, biases, norm_weight=gamma, activation=activation)

    def exact() -> Tensor:
        joined = torch.cat(weight) if pair else weight
        t = [None if v is None else v.double() for v in (gamma, joined, packed_bias)]
        h = nn.functional.layer_norm(x.double(), (K,), t[0])
        h = nn.functional.linear(h, *t[1:])
        if activation == "gelu":
            return nn.functional.gelu(h)
        return nn.functional.silu(h[:, :N]) * h[:, N:] if activation else h

    for _ in range(2):
        with torch.no_grad():
            for _ in range(3):
                error = (call().double() - exact()).norm() / exact().norm()
                assert error < 6e-3
            with fn.frozen_parameters():
                for _ in range(2):
                    call()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = call()
            graph.replay()
            assert (y.double() - exact()).norm() / exact().norm() < 6e-3
            for each in weight if pair else [weight]:
                each.mul_(-0.5)
