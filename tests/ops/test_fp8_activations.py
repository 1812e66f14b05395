"""Activations and gates between products in FP8: in the product, and before a quantization."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ON_HOPPER
from fp8_bounds import matrix
from fp8_kernels import running
from fp8_products import SHORT, decibels
from torch import Tensor
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import ACTIVATIONS, activated, activation_gradient, is_gate
from fused_norm.ops import scaled_layers
from fused_norm.ops.eight_bits import quantize
from fused_norm.recipes import E4M3, Cast

BF16 = torch.bfloat16
SERVED = ("rowwise", "tensorwise", "rowwise_with_gw_hp", "blockwise")
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
M, K, N = 40, 64, 48


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations(activation: str) -> None:
    torch.manual_seed(0)
    h = torch.randn(M, 2 * N, dtype=torch.float64, requires_grad=True)
    a = activated(activation, h)
    da = torch.randn_like(a)
    expected = torch.autograd.grad(a, h, da)[0]
    torch.testing.assert_close(activation_gradient(activation, da, h), expected)


def layers(activation: str, is_pair: bool, has_bias: bool) -> tuple[list[Tensor], list[Any]]:
    """Return the weights and biases before an activation that returns N elements."""
    count = 2 if is_pair else 1
    size = 2 * N // count if is_gate(activation) else N
    weights = [(matrix(size, K, seed=i) / 8).requires_grad_() for i in range(count)]
    # Not aligned to 16 bytes.
    biases = [matrix(size + 1, seed=i)[1:].requires_grad_() for i in range(count)]
    return weights, biases if has_bias else [None] * count


CASES = [
    (activation, is_pair)
    for activation, is_pair in itertools.product(("relu", "gelu", "swiglu", "geglu"), (False, True))
    if is_gate(activation) or not is_pair
]


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize(("activation", "is_pair"), CASES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_steps(recipe: str, activation: str, is_pair: bool, has_bias: bool, tmp_path: Path) -> None:
    weights, biases = layers(activation, is_pair, has_bias)
    x, out = matrix(2, M // 2, K).requires_grad_(), (matrix(K, N, seed=5) / 8).requires_grad_()
    inputs = [t for t in (x, out, *weights, *biases) if t is not None]

    def step(recipe: str | None = recipe, dtype: torch.dtype = BF16) -> list[Tensor]:
        own = [t.detach().to(dtype).requires_grad_() for t in inputs]
        x, out, *rest = own
        ws, bs = tuple(rest[: len(weights)]), tuple(rest[len(weights) :] or biases)
        given = (ws, bs) if is_pair else (ws[0], bs[0])
        y = fn.norm_mlp(x, *given, out, activation=activation, recipe=recipe)
        return [y.detach(), *torch.autograd.grad(y, own, matrix(*y.shape, seed=7).to(dtype))]

    expected = step()
    with running(tmp_path) as ran:
        found = step()
    count, has_fp8_wgrad = len(weights), recipes.find(recipe).has_fp8_wgrad
    names = [name for name, _ in ran]
    # One product in the forward, which activates (with scales of blocks one for each layer, and a
    # pass); one gradient, of all layers before.
    forward = 1 + (count if recipe == "blockwise" else 1)
    assert names.count("linear") == forward + (1 + count) * (1 + has_fp8_wgrad)
    exact = step(None, torch.float64)
    for place, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if recipe == "blockwise":
            # What a pass activates has been rounded once more.
            assert decibels(a, exact[place]) > decibels(e, exact[place]) - SHORT
        elif place and inputs[place - 1].dim() == 1:
            # Sums of rows have an order of their own.
            assert decibels(a, e) > 50
        else:
            assert torch.equal(a, e), place


def arguments(
    activation: str, is_pair: bool, recipe: str, wanted: list[int], rows: int = M
) -> tuple[Any, ...]:
    """Return what a backward before an activation is called with, and da, h and z."""
    weights, _ = layers(activation, is_pair, False)
    weights = [w.detach() for w in weights]
    z, da = matrix(rows, K), matrix(rows, N, seed=3)
    h = matrix(rows, sum(map(len, weights)), seed=4)
    how = recipes.find(recipe)
    scalings = (how.grad.scaling, how.grad.dtype is not E4M3, how.weight_for_dgrad.scaling)
    rest = (*scalings, how.input.scaling, how.power_of_two, how.has_fp8_wgrad, wanted, False)
    return z, None, h, activation, [da], weights, [None] * len(weights), *rest


@pytest.mark.parametrize(("activation", "is_pair"), [("gelu", False), ("swiglu", True)])
def test_registration(activation: str, is_pair: bool, tmp_path: Path) -> None:
    weights, biases = layers(activation, is_pair, True)
    given = [[v.detach() for v in vs] for vs in (weights, biases)]
    none = [None] * len(weights)
    ops = torch.ops.fused_norm
    with running(tmp_path) as ran:
        for keeps_h, keeps in itertools.product((False, True), (False, True)):
            how = ("row", "row", True, BF16, False, activation, keeps_h, keeps, keeps)
            forward = (matrix(M, K), given[0], none, given[1], *how)
            opcheck(ops.fp8_layers.default, forward, test_utils=OF_8_BITS)
            opcheck(ops.fp8_layers.default, (*forward, None, None, True), test_utils=OF_8_BITS)
        for wanted in ([0, 1, 2], [0], [1], [2]):
            z, _, *rest = arguments(activation, is_pair, "rowwise", wanted)
            rows = quantize(z, Cast(E4M3, "row"), True, plain=False, transposed=True)
            for operands in ((z, None, *rest), (*rows, *rest)):
                opcheck(ops.fp8_layers_backward.default, operands, test_utils=OF_8_BITS)
    assert ran


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize(("activation", "is_pair"), [("gelu", False), ("swiglu", True)])
@pytest.mark.parametrize("trains", [True, False])
def test_activations_leave_their_maxima(
    recipe: str,
    activation: str,
    is_pair: bool,
    trains: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layer after an activation finds none that the product has left; bits stay the same."""
    weights, biases = layers(activation, is_pair, True)
    x, out = matrix(2, M // 2, K).requires_grad_(), matrix(K, N, seed=5).requires_grad_(trains)
    inputs = [t for t in (x, out, *weights, *biases) if t.requires_grad]
    given = (tuple(weights), tuple(biases)) if is_pair else (weights[0], biases[0])

    def step() -> tuple[list[Tensor], int]:
        with running(tmp_path) as ran:
            y = fn.norm_mlp(x, *given, out, activation=activation, recipe=recipe)
            found = [y.detach(), *torch.autograd.grad(y, inputs, matrix(*y.shape, seed=7))]
        return found, ran.matrices["maxima"]

    expected, count = step()
    # As if the tensors were on Hopper.
    monkeypatch.setattr("fused_norm.ops.fp8.serves", lambda *_: True)
    found, with_maxima = step()
    assert count - with_maxima == (trains and recipe in ("rowwise", "tensorwise"))
    for a, e in zip(found, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("recipe", SERVED)
def test_no_rows(recipe: str) -> None:
    weights, biases = layers("swiglu", True, True)
    x, out = matrix(0, K).requires_grad_(), matrix(K, N).requires_grad_()
    y = fn.norm_mlp(x, tuple(weights), tuple(biases), out, activation="swiglu", recipe=recipe)
    y.sum().backward()
    assert all(not v.grad.any() for v in (out, *weights, *biases))


def on(device: str, given: Any) -> Any:
    if isinstance(given, list):
        return [on(device, v) for v in given]
    return given.to(device) if isinstance(given, Tensor) else given


gpu = [
    pytest.mark.gpu,
    ON_HOPPER,
]
ALL = [
    pytest.param(name, is_pair, marks=gpu)
    for name, is_pair in itertools.product(ACTIVATIONS, (False, True))
    if is_gate(name) or not is_pair
]


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize(("activation", "is_pair"), ALL)
@pytest.mark.parametrize("rows", [40, 513, 4096])
def test_gradients_of_kernels(recipe: str, activation: str, is_pair: bool, rows: int) -> None:
    """Kernels compute the gradient before an activation to a few bits more than bfloat16 has."""
    wanted = [0, *range(1, 3 + 2 * is_pair)]
    operands = on("cuda", list(arguments(activation, is_pair, recipe, wanted, rows)))
    found = torch.ops.fused_norm.fp8_layers_backward(*operands)
    again = torch.ops.fused_norm.fp8_layers_backward(*operands)
    expected = torch.ops.fused_norm.fp8_layers_backward_by_python(*operands)
    for a, b, e in zip(found, again, expected, strict=True):
        assert torch.equal(a, b)
        # A number that is rounded to bfloat16 otherwise may be so to 8 bits.
        assert decibels(a, e.double()) > 35


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize(("activation", "is_pair"), ALL)
@pytest.mark.parametrize("rows", [40, 513])
def test_products_of_kernels(recipe: str, activation: str, is_pair: bool, rows: int) -> None:
    weights, biases = layers(activation, is_pair, True)
    how = recipes.find(recipe)
    scalings = (how.input.scaling, how.weight.scaling, how.power_of_two)
    keeps = (True, how.has_fp8_wgrad, how.weight == how.weight_for_dgrad)
    none = [None] * len(weights)
    given = [[v.detach() for v in vs] for vs in (weights, biases)]
    operands = [matrix(rows, K), given[0], none, given[1], *scalings, BF16, False, activation]
    operands += keeps
    found = torch.ops.fused_norm.fp8_layers(*on("cuda", operands))
    # On a GPU it rounds the values of quantized numbers to bfloat16, which kernels do not.
    expected = torch.ops.fused_norm.fp8_layers_by_python(*operands)
    for a, e in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if a.dtype is BF16:
            assert decibels(a.cpu(), e.double()) > 45
        else:
            assert torch.equal(a.cpu().float(), e.float())


def of_activation(activation: str, is_pair: bool, rows: int, features: int, scaling: str) -> Any:
    """Return arguments of `fp8_layers` on a GPU that leave the maxima of an activation."""
    count = 2 if is_pair else 1
    size = 2 * features // count if is_gate(activation) else features
    weights = [(matrix(size, K, seed=i) / 8).cuda() for i in range(count)]
    biases = [matrix(size, seed=i).cuda() for i in range(count)]
    how = (scaling, scaling, True, BF16, False, activation, True, False, False)
    x = matrix(rows, K, seed=9).cuda()
    return [x, weights, [None] * count, biases, *how, None, None, True]


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("activation", "is_pair"), ALL)
@pytest.mark.parametrize(("rows", "features"), [(40, 48), (513, 272), (4096, 1040), (129, 192)])
def test_kernels_leave_maxima(
    scaling: str, activation: str, is_pair: bool, rows: int, features: int
) -> None:
    given = of_activation(activation, is_pair, rows, features, scaling)
    for special in (None, torch.inf, torch.nan):
        if special is not None:
            given[0][rows // 2, 3] = special
        a, *_, maxima = torch.ops.fused_norm.fp8_layers(*given)
        expected = scaled_layers.maxima_of(a, scaling).view(torch.int32)
        bits = maxima.view(torch.int32)
        # Of numbers that are none, any bits.
        are_none = expected > 0x7F80
        assert torch.equal(bits > 0x7F80, are_none)
        assert torch.equal(bits[~are_none], expected[~are_none])
        plain = torch.ops.fused_norm.fp8_layers(*given[:-1], False)
        assert torch.equal(a.nan_to_num(7.0), plain[0].nan_to_num(7.0))


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("activation", "is_pair"), ALL)
@pytest.mark.parametrize(("rows", "features"), [(40, 48), (513, 272), (4096, 1040)])
def test_kernels_take_maxima(
    scaling: str, activation: str, is_pair: bool, rows: int, features: int
) -> None:
    given = of_activation(activation, is_pair, rows, features, scaling)
    a, *_, maxima = torch.ops.fused_norm.fp8_layers(*given)
    out = [(matrix(K, features, seed=5) / 8).cuda()]
    how = (scaling, scaling, True, BF16, False, "", False, True, True)
    operands = (a, out, [None], [None], *how, None)
    found = torch.ops.fused_norm.fp8_layers(*operands, maxima, False)
    expected = torch.ops.fused_norm.fp8_layers(*operands, None, False)
    for x, e in zip(found, expected, strict=True):
        assert torch.equal(x.float(), e.float())
