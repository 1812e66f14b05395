"""Each operand in turn one element beyond a multiple of 16 bytes, where vector loads start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import family
import pytest
import torch
from accuracy import as_copies, assert_within_budget
from strategies import hopper_goes
from torch import Tensor

import fused_norm as fn
from fused_norm.call import record

PLAIN = dict(zip(family.GRID, (values[0] for values in family.GRID.values()), strict=True))
CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "activated": {"activation": "gelu", "return_sum": True, "residual": True},
    "gate of one": {"activation": "swiglu", "normalization": "rms_norm"},
    "gate of two": {"weights": 2, "activation": "swiglu", "normalization": "rms_norm"},
    "geglu of two": {"weights": 2, "activation": "geglu"},
    "q, k, v": {"weights": 3, "residual": True, "return_sum": True},
    "AdaLN": {"modulation": "batch", "gamma": "missing", "beta": False, "activation": "gelu_tanh"},
    "statistics": {"residual": True, "statistics": True, "return_norm": True},
    "MLP": {"op": "norm_mlp", "activation": "gelu", "residual_out": True},
    "gated MLP": {"op": "norm_mlp", "activation": "geglu", "weights": 2},
}
# Where Hopper's own products run; those of a CPU do at any size.
SIZES = {"cpu": ((2, 24), 64, 48), "cuda": ((4, 1024), 1024, 1024)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def shifted(tensor: Tensor) -> Tensor:
    """Return a copy that starts one element beyond where memory is given."""
    memory = tensor.new_empty(tensor.numel() + 1)
    found = memory[1:].view(tensor.shape).copy_(tensor.detach())
    assert found.data_ptr() % 16 == tensor.element_size()
    return found.detach().requires_grad_(tensor.requires_grad)


@pytest.fixture(params=["as it comes", "folded", "normalized first"])
def strategy(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Which strategy Hopper's kernels are asked to take."""
    strategies = {"folded": record.NEW_FOLD, "normalized first": record.FUSED}
    if request.param not in strategies:
        yield request.param
        return
    if device == "cpu":
        pytest.skip("a CPU has one strategy")
    with hopper_goes(strategies[request.param]):
        yield request.param


def with_shift(tensors: dict[str, Any]) -> Iterator[tuple[str, Callable[[list[Any]], list[Any]]]]:
    """Give the name of each tensor of a case, and what copies all and shifts that one."""
    for name, tensor in family.leaves(tensors).items():

        def copied(each: list[Any], one: Tensor = tensor) -> list[Any]:
            pairs = zip(each, as_copies(each), strict=True)
            return [shifted(one) if old is one else copy for old, copy in pairs]

        yield name, copied


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("own_kernels")
def test_operands(name: str, dtype: torch.dtype, device: str, strategy: str) -> None:
    """Regression: on Hopper, a gate's second weight elsewhere was a misaligned address."""
    case = PLAIN | CASES[name] | {"dtype": dtype, "shape": SIZES[device]}
    tensors = family.make_tensors(case, device)
    tried = dict(with_shift(tensors))
    assert {"x", "weight[0]", "bias[0]"} <= set(tried)
    for operand, copied in tried.items():
        try:
            family.check(case, tensors, copied=copied)
        except Exception as error:
            error.add_note(f"with {operand} shifted")
            raise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("own_kernels")
def test_everything(name: str, dtype: torch.dtype, device: str, strategy: str) -> None:
    """All operands, then the gradients of the results, then both."""
    case = PLAIN | CASES[name] | {"dtype": dtype, "shape": SIZES[device]}
    tensors = family.make_tensors(case, device)

    def every(each: list[Any]) -> list[Any]:
        return [t if t is None else shifted(t) for t in each]

    family.check(case, tensors, copied=every)
    family.check(case, tensors, placed=shifted)
    family.check(case, tensors, copied=every, placed=shifted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("own_kernels")
def test_linear_add(dtype: torch.dtype, device: str) -> None:
    (leading, K, N) = SIZES[device]
    shapes = {"x": (*leading, K), "weight": (N, K), "bias": (N,), "residual": (*leading, N)}
    sizes = {"x": 1.0, "weight": K**-0.5, "bias": 0.2, "residual": 1.0, "dy": 1.0}
    shapes["dy"] = shapes["residual"]
    start = {
        name: (sizes[name] * torch.randn(shape, dtype=torch.float64)).to(device, dtype)
        for name, shape in shapes.items()
    }
    for moved in start:
        mine, low, high = (
            {n: t.clone() if n == "dy" else t.clone().requires_grad_() for n, t in these.items()}
            for these in (start, start, {n: t.double() for n, t in start.items()})
        )
        mine[moved] = shifted(mine[moved])
        found = []
        for t in (mine, low, high):
            leaves = [t[name] for name in ("x", "weight", "bias", "residual")]
            if t is mine:
                y = fn.linear_add(*leaves, normalization=None)[0]
            else:
                y = torch.nn.functional.linear(*leaves[:3]) + leaves[3]
            found.append([y, *torch.autograd.grad(y, leaves, t["dy"])])
        for name, *results in zip(("y", *shapes), *found, strict=False):
            ours, bar, truth = results
            assert_within_budget(f"{name} with {moved} shifted", ours, truth, bar)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("own_kernels")
def test_main_grad(dtype: torch.dtype, device: str) -> None:
    """The target is a part of a flat buffer of gradients, at any offset."""
    (leading, K, N) = SIZES[device]
    results = []
    for moves in (False, True):
        torch.manual_seed(0)
        layer = fn.LayerNormLinear(K, N, device=device, dtype=dtype, fuse_wgrad_accumulation=True)
        main_grad = torch.ones(N, K, device=device)
        layer.weight.main_grad = shifted(main_grad) if moves else main_grad
        x = torch.randn(*leading, K, device=device).to(dtype).requires_grad_()
        y = layer(x)
        y.backward(torch.randn_like(y))
        results.append((layer.weight.main_grad.double(), layer.bias.grad, x.grad))
    (aligned, *others), (moved, *moved_others) = results
    # Sums in another order, or of z rounded to the dtype.
    assert (aligned - moved).norm() <= torch.finfo(dtype).eps * aligned.norm()
    for one, other in zip(others, moved_others, strict=True):
        assert (one.double() - other.double()).norm() <= torch.finfo(dtype).eps * one.norm()
