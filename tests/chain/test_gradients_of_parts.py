"""Gradients of parts of a Linear layer's output, by kernels that stand in, and by Hopper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_copies, as_float64, assert_within_budget
from devices import ON_HOPPER
from grouped import make
from launches import names
from stand_in import standing_in
from test_grouped_records import ALONE, StandIn
from torch import Tensor

from fused_norm.ops.operands import adds_up_gradients
from fused_norm.ops.output_parts import norm_linear_in_parts

SIZES = (40, 16, 8)


def whole(inputs: list[Any], sizes: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Return what PyTorch's ops compute."""
    x, residual, gamma, beta, weight, bias = inputs
    x = x if residual is None else x + residual
    z = F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5)
    if scale := options.get("modulated"):
        z = z * (1 + scale * gamma) + beta
    return list(F.linear(z, weight, bias).split(list(sizes), -1))


def in_parts(inputs: list[Any], sizes: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Return what the library computes."""
    x, residual, gamma, beta, weight, bias = inputs
    norm = {"norm_weight": gamma, "norm_bias": beta, "residual": residual}
    if scale := options.get("modulated"):
        norm |= {"scale": scale * gamma, "shift": beta}
    return list(norm_linear_in_parts(x, weight, bias, sizes, **norm))


def check(
    inputs: list[Any], sizes: tuple[int, ...], used: set[int] | None = None, **options: Any
) -> None:
    """Compare results and gradients with float64; a gradient reaches those parts in `used`."""
    found = []
    for function, copies in (
        (in_parts, as_copies(inputs)),
        (whole, as_copies(inputs)),
        (whole, as_float64(inputs)),
    ):
        outputs = function(copies, sizes, **options)
        torch.manual_seed(3)
        dys = [torch.randn(y.shape, dtype=torch.float64, device=y.device) for y in outputs]
        dys = [dy.to(inputs[0].dtype).to(y.dtype) for y, dy in zip(outputs, dys, strict=True)]
        leaves = [t for t in copies if t is not None and t.requires_grad]
        of = [i for i in range(len(outputs)) if used is None or i in used]
        gradients = torch.autograd.grad([outputs[i] for i in of], leaves, [dys[i] for i in of])
        found.append([*(y.detach() for y in outputs), *gradients])
    for i, (mine, low, high) in enumerate(zip(*found, strict=True)):
        assert_within_budget(f"{i}", mine, high, low)


@pytest.fixture
def kernels(tmp_path: Path) -> Any:
    """Replace Hopper's kernels by the stand-in."""
    stand_in = StandIn()
    with standing_in(tmp_path, lambda name, place: getattr(stand_in, name)(place)):
        yield stand_in


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("bias", ["b", "-"])
@pytest.mark.parametrize("used", [None, {0, 2}, {1}])
def test_one_kernel_adds_up(kernels: StandIn, bias: str, used: set[int] | None) -> None:
    check(make((24, 32, [64]), bias), SIZES, used)
    assert kernels.done == ["input_gradients", "weight_gradients"]
    kernels.done.clear()
    kernels.declines += ("weight_gradients",)
    check(make((24, 32, [64]), bias), SIZES, used)
    assert kernels.done == ["input_gradients"] + ["weight_gradient"] * 3


@pytest.mark.usefixtures("by_kernels")
def test_one_kernel_passes_over_the_rows(kernels: StandIn) -> None:
    kernels.declines = ALONE
    check(make((24, 32, [64]), "b"), SIZES)
    assert kernels.done == ["passed_rows", "weight_gradients"]
    kernels.done.clear()
    # Of two parts; without the gradient of x, nothing is added up.
    inputs = make((24, 32, [64]), "b")
    inputs[0].requires_grad_(False)
    for t in inputs[2:4]:
        t.requires_grad_(False)
    check(inputs, (24, 40))
    assert kernels.done == ["weight_gradients"]


@pytest.mark.usefixtures("by_kernels")
def test_what_is_declined_is_concatenated(kernels: StandIn) -> None:
    kernels.declines += ("input_gradients",)
    check(make((24, 32, [64]), "b"), SIZES)
    assert kernels.done == ["weight_gradient"]
    kernels.done.clear()
    # More parts than one launch takes.
    kernels.declines = ALONE
    check(make((24, 32, [64]), "b"), (16, 16, 16, 16))
    assert kernels.done == ["weight_gradient"]


@pytest.mark.usefixtures("by_kernels")
def test_a_transposed_weight_is_concatenated(kernels: StandIn) -> None:
    inputs = make((24, 32, [64]), "b")
    inputs[4] = inputs[4].detach().t().contiguous().t().requires_grad_()
    check(inputs, SIZES)
    assert "input_gradients" not in kernels.done


CASES: dict[str, tuple[tuple[int, int], tuple[int, ...], dict[str, Any], str]] = {
    "one kernel passes over the rows": ((10400, 2048), (1800, 264, 136), {}, "256_one_sum"),
    "one kernel adds up": ((8400, 1024), (1000, 264, 136), {}, "one_sum"),
    "modulated": ((8400, 1024), (1000, 264, 136), {"modulated": 0.5}, "one_sum"),
    "two parts": ((8400, 1024), (1000, 400), {}, "one_sum"),
}


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", ["b", "-"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("case", CASES)
def test_on_hopper(case: str, residual: bool, bias: str, dtype: torch.dtype) -> None:
    (M, K), sizes, options, kernel = CASES[case]
    inputs = make((M, K, [sum(sizes)]), bias, dtype=dtype, device="cuda", residual=residual)
    check(inputs, sizes, **options)
    check(inputs, sizes, {0}, **options)
    outputs = in_parts(inputs, sizes, **options)
    dys = [torch.randn_like(y) for y in outputs]
    assert adds_up_gradients(inputs[0], sizes, not options)
    launched = names(lambda: torch.autograd.backward(outputs, dys))
    assert launched.count(kernel) == 1, launched


@ON_HOPPER
@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 32, 32), (1020, 264, 140)])
def test_concatenated_on_hopper(sizes: tuple[int, ...]) -> None:
    """Few tiles, and lengths that TMA cannot step over."""
    check(make((2000, 264, [sum(sizes)]), "b", dtype=torch.bfloat16, device="cuda"), sizes)
