"""Calls on a CPU as dispatched for users: their values and gradients, with kernels or PyTorch.

All other tests also run kernels at sizes at which PyTorch's ops are faster.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import family
import pytest
import torch
from accuracy import assert_within_budget
from family import PLAIN
from torch import Tensor, nn

import fused_norm as fn
from fused_norm import composition
from fused_norm.ops import node

pytestmark = pytest.mark.as_dispatched

K, N = 400, 700
# Rows of a call that is the host's time, of one that is not, and of a single token.
ROWS = {"small": 7, "large": 80 * torch.get_num_threads(), "one": 1}
CASES: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "RMSNorm, residual": {"normalization": "rms_norm", "residual": True, "return_sum": True},
    "gate": {"weights": 2, "activation": "swiglu"},
    "q, k and v": {"weights": 3, "normalization": "rms_norm", "beta": False, "bias": False},
    "MLP": {"op": "norm_mlp", "activation": "gelu", "residual_out": True},
}
every_size = pytest.mark.parametrize("size", ROWS)


@pytest.fixture(params=["node", "python"])
def by_pytorch(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    watch: Callable[..., list[Any]],
) -> Iterator[list[Any]]:
    """Have calls begin in C++, or in Python as without a compiler; see those that PyTorch has."""
    if request.param == "python":
        monkeypatch.setattr(node, "module", lambda: None)
    else:
        request.getfixturevalue("python_calls")
    return watch(composition, "compute")


def assert_dispatched(by_pytorch: list[Any], size: str, dtype: torch.dtype) -> None:
    """Small calls that begin in Python are PyTorch's, and large ones in float32 never are."""
    if node.module() is None and size != "large":
        assert by_pytorch
    elif dtype is torch.float32:
        assert not by_pytorch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@every_size
def test_functions(size: str, name: str, dtype: torch.dtype, by_pytorch: list[Any]) -> None:
    case = PLAIN | {"dtype": dtype, "shape": ((ROWS[size],), K, N)} | CASES[name]
    family.check(case, family.make_tensors(case))
    assert_dispatched(by_pytorch, size, dtype)


class Plain(nn.Module):
    """What the modules of `Fused` replace, as PyTorch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.linear = nn.LayerNorm(K), nn.Linear(K, K)
        self.norm2, self.up, self.down = nn.RMSNorm(K, 1e-5), nn.Linear(K, 2 * N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(self.norm1(x))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        y: Tensor = x + self.down(nn.functional.silu(gate) * up)
        return y


class Fused(nn.Module):
    """The same of the library's modules, with the same parameters in the same order."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self.first = fn.LayerNormLinear(K, K)
        self.second = fn.LayerNormMLP(K, N, normalization="RMSNorm", activation="swiglu")
        own = dict(self.named_parameters())
        for name, parameter in plain.named_parameters():
            own[NAMES[name]].data.copy_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        y: Tensor = x + self.second(x)
        return y


NAMES = {
    "norm1.weight": "first.layer_norm_weight",
    "norm1.bias": "first.layer_norm_bias",
    "linear.weight": "first.weight",
    "linear.bias": "first.bias",
    "norm2.weight": "second.layer_norm_weight",
    "up.weight": "second.fc1_weight",
    "up.bias": "second.fc1_bias",
    "down.weight": "second.fc2_weight",
    "down.bias": "second.fc2_bias",
}


@pytest.fixture
def plain() -> Plain:
    model = Plain()
    for p in model.parameters():
        nn.init.normal_(p, float(p.dim() == 1), 0.05)
    return model


def step(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Return the output of a step, and the gradients of x and of all parameters."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = run(x)
    y.square().mean().backward()
    found = {NAMES.get(name, name): p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **found}


def assert_agree(found: dict[str, Tensor], plain: Plain, x: Tensor) -> None:
    bar = step(plain, plain, x)
    exact = copy.deepcopy(plain).double()
    for name, truth in step(exact, exact, x.double()).items():
        assert_within_budget(name, found[name], truth, bar[name])


@every_size
def test_modules(size: str, plain: Plain, by_pytorch: list[Any]) -> None:
    x = torch.randn(ROWS[size], K)
    fused = Fused(plain)
    assert_agree(step(fused, fused, x), plain, x)
    assert_dispatched(by_pytorch, size, torch.float32)


@every_size
def test_frozen(size: str, plain: Plain, by_pytorch: list[Any]) -> None:
    """Frozen, thawed, written to and frozen again: each time of the parameters as they are."""
    x = torch.randn(ROWS[size], K)
    fused = Fused(plain).eval()
    for _ in range(2):
        with torch.no_grad():
            exact, bar = copy.deepcopy(plain).double()(x.double()), plain(x)
            fn.freeze(fused)
            for _ in range(4):
                assert_within_budget("y", fused(x), exact, bar)
            fn.unfreeze(fused)
            for name, parameter in plain.named_parameters():
                parameter.mul_(1.1)
                fused.get_parameter(NAMES[name]).mul_(1.1)


@every_size
def test_training(size: str, plain: Plain, by_pytorch: list[Any]) -> None:
    """Losses of an optimizer's steps, whose writes each forward has to see."""
    x = torch.randn(ROWS[size], K)
    fused = Fused(plain)
    losses: dict[nn.Module, list[float]] = {plain: [], fused: []}
    for module, found in losses.items():
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        for _ in range(5):
            loss = (module(x) - x.flip(-1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    assert losses[plain][-1] < 0.9 * losses[plain][0]
    assert losses[fused] == pytest.approx(losses[plain], rel=1e-4)
    assert_dispatched(by_pytorch, size, torch.float32)


@every_size
def test_backend(size: str, plain: Plain, by_pytorch: list[Any]) -> None:
    """In training and in inference, which are two graphs."""
    torch._dynamo.reset()
    x = torch.randn(ROWS[size], K)
    run = torch.compile(plain, backend=fn.models.backend, options={"then": "eager"})
    assert_agree(step(plain, run, x), plain, x)
    with torch.no_grad():
        exact = copy.deepcopy(plain).double()(x.double())
        assert_within_budget("y", run(x), exact, plain(x))
