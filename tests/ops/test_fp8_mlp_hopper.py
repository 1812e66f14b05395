"""Hopper's product that stores the gradient before an activation, in an MLP's backward in FP8."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from cuda_graphs import assert_same_in_graphs_and_after_writes
from fp8_products import SHORT, decibels
from test_fp8_blocks import on_hopper, ran
from torch import Tensor

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import ACTIVATIONS, activated, activation_gradient, is_gate
from fused_norm.norms import NORMALIZATIONS
from fused_norm.ops import normed_linears
from fused_norm.ops.eight_bits import quantize
from fused_norm.recipes import E4M3, Cast

pytestmark = on_hopper
BF16 = torch.bfloat16
OPS = torch.ops.fused_norm
# The products have one formula, for these; others keep their pass.
SMOOTH = [name for name in ACTIVATIONS if name not in ("relu", "reglu")]
CASES = [
    (name, layers)
    for name, layers in itertools.product(SMOOTH, (1, 2))
    if is_gate(name) or layers == 1
]
# M, K, N, K2: ragged rows of a tile and of many; outputs and sums that fill no tile.
SIZES = [(1, 64, 272, 48), (5, 16, 16, 16), (129, 272, 208, 1040), (1000, 768, 3072, 768)]
SIZES += [(4097, 1024, 1040, 144), (2050, 128, 4112, 2064)]
# Numbers that are rounded otherwise before they are quantized now and then become others; where
# all share a scale, it may as well.
NEAR = {"rowwise": 33.0, "rowwise_with_gw_hp": 33.0, "blockwise": 33.0, "tensorwise": 26.0}


def matrix(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda").to(BF16)


def wide(M: int, K: int, N: int, K2: int, activation: str, layers: int) -> dict[str, Any]:
    """Return an MLP's tensors and a gradient in bfloat16."""
    size = N * (1 + is_gate(activation)) // layers
    h = matrix(M, layers * size, seed=1) * 2
    return {
        "z": matrix(M, K),
        "h": h,
        "weights": [matrix(size, K, seed=2 + i) / K**0.5 for i in range(layers)],
        "a": activated(activation, h),
        "down": matrix(K2, N, seed=4) / N**0.5,
        # Rows of sizes of their own.
        "dy": matrix(M, K2, seed=5) * matrix(M, 1, seed=6).exp(),
    }


def places(layers: int) -> list[int]:
    return list(range(3 + 2 * layers))


def arguments(
    t: dict[str, Any], activation: str, recipe: str, in_8_bits: bool, wanted: list[int]
) -> tuple[Any, ...]:
    """Return what the op is called with: operands in bfloat16, or in 8 bits and transposed."""
    how = recipes.find(recipe)
    grad = (how.grad.scaling, how.grad.dtype is not E4M3, how.weight_for_dgrad.scaling)
    last = (*grad, how.input.scaling, how.power_of_two, how.has_fp8_wgrad, wanted, False)

    def kept(v: Tensor, scaling: str) -> tuple[Tensor, Tensor | None]:
        if not in_8_bits:
            return v, None
        cast = Cast(E4M3, scaling)
        q, scale = quantize(v, cast, how.power_of_two, plain=False, transposed=True)
        return q, scale.expand(len(q), 1).contiguous()

    by = how.weight_for_dgrad.scaling
    weights = [kept(w, by) for w in t["weights"]]
    of_first = ([q for q, _ in weights], [scale for _, scale in weights])
    rows, columns = kept(t["z"], how.input.scaling), kept(t["a"], how.input.scaling)
    first = (*rows, t["h"], activation, *of_first)
    return *first, *columns, *kept(t["down"], by), t["dy"], *last


def exact(t: dict[str, Any], activation: str) -> list[Tensor]:
    """Return all gradients in float64, of operands that are not quantized."""
    weights = [w.double() for w in t["weights"]]
    z, h, a, down, dy = (t[name].double() for name in ("z", "h", "a", "down", "dy"))
    dhs = activation_gradient(activation, dy @ down, h).chunk(len(weights), 1)
    dz = sum(dh @ w for dh, w in zip(dhs, weights, strict=True))
    found = [dz, *(dh.t() @ z for dh in dhs), *(dh.sum(0) for dh in dhs)]
    return [*found, dy.t() @ a, dy.sum(0)]


def passes(names: list[str]) -> int:
    """Return how many passes found the maxima of a matrix, among the kernels that ran."""
    others = ("norm_maxima", "quantize_by_maxima", "fused_norm")
    return sum("maxima" in n and not any(other in n for other in others) for n in names)


def products(names: list[str]) -> int:
    """Return how many products stored the gradient before an activation."""
    return sum("fused_norm_matrix" in n and "gradient" in n for n in names)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize(("activation", "layers"), CASES)
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_gradients(recipe: str, activation: str, layers: int, in_8_bits: bool) -> None:
    """They are as near to exact ones as those of two ops; the second layer's have their bits."""
    for sizes in SIZES:
        t = wide(*sizes, activation, layers)
        given = arguments(t, activation, recipe, in_8_bits, places(layers))
        found, names = ran(functools.partial(OPS.fp8_mlp_backward, *given))
        assert products(names) == 1, names
        name = next(n for n in names if "gradient" in n)
        assert ("gate_gradient" in name) == is_gate(activation)
        if in_8_bits:
            # Of dy alone.
            assert passes(names) == 1, names
        for one, other in zip(found, OPS.fp8_mlp_backward(*given), strict=True):
            assert torch.equal(one, other)
        expected = OPS.fp8_mlp_backward_by_python(*given)
        truth = exact(t, activation)
        for one, other in zip(found[-2:], expected[-2:], strict=True):
            assert torch.equal(one, other)
        # Few numbers have errors of which some happen to cancel.
        few = sizes[0] <= 100
        short, near = (5 * SHORT if few else SHORT), NEAR[recipe] - 5 * few
        for place, (one, other) in enumerate(zip(found[:-2], expected[:-2], strict=True)):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert decibels(one, other) > near, (sizes, place)
            least = decibels(other, truth[place]) - short
            assert decibels(one, truth[place]) > least, (sizes, place)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize(("activation", "layers"), [("gelu", 1), ("swiglu", 1), ("swiglu", 2)])
def test_some_gradients(recipe: str, activation: str, layers: int) -> None:
    """Whichever are wanted, they have the same bits."""
    t = wide(257, 144, 208, 272, activation, layers)
    everything = places(layers)
    whole = OPS.fp8_mlp_backward(*arguments(t, activation, recipe, True, everything))
    first, second = everything[:-2], everything[-2:]
    for wanted in ([0], [1], first[1:], second, [0, *second], [first[-1]], everything[::-1]):
        given = arguments(t, activation, recipe, True, wanted)
        found, names = ran(functools.partial(OPS.fp8_mlp_backward, *given))
        assert products(names) == (min(wanted) < second[0])
        for place, one in zip(wanted, found, strict=True):
            assert torch.equal(one, whole[place]), (wanted, place)


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "blockwise"])
def test_other_recipes(recipe: str) -> None:
    """One with weights' products in bfloat16, and one that is left to two ops."""
    t = wide(300, 128, 256, 384, "swiglu", 2)
    given = arguments(t, "swiglu", recipe, False, places(2))
    found, names = ran(lambda: OPS.fp8_mlp_backward(*given))
    assert products(names) == (recipe != "blockwise")
    expected = OPS.fp8_mlp_backward_by_python(*given)
    for one, other in zip(found, expected, strict=True):
        assert decibels(one, other) > NEAR[recipe]


@pytest.mark.parametrize(("activation", "layers"), [("relu", 1), ("reglu", 1), ("reglu", 2)])
def test_what_is_not_smooth_keeps_its_pass(activation: str, layers: int) -> None:
    t = wide(300, 128, 256, 384, activation, layers)
    given = arguments(t, activation, "rowwise", True, places(layers))
    found, names = ran(lambda: OPS.fp8_mlp_backward(*given))
    assert (products(names), passes(names)) == (0, 2), names
    expected = OPS.fp8_mlp_backward_by_python(*given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize(("activation", "layers"), [("gelu", 1), ("swiglu", 1), ("swiglu", 2)])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen(
    recipe: str, activation: str, layers: int, number: float
) -> None:
    wanted = places(layers)
    for name in ("dy", "h", "down"):
        if name == "h" and math.isinf(number) and not is_gate(activation):
            # Formulas differ in whether this is zero times infinity.
            continue
        t = wide(300, 128, 208, 272, activation, layers)
        clean = OPS.fp8_mlp_backward(*arguments(t, activation, recipe, True, wanted))
        # Of a gate, what it multiplies.
        t[name][7, -3] = number
        given = arguments(t, activation, recipe, True, wanted)
        found = OPS.fp8_mlp_backward(*given)
        dz, *others = found[:-2]
        assert not dz[7].isfinite().all()
        assert any(not v.isfinite().all() for v in others)
        for one, other in zip(found, OPS.fp8_mlp_backward_by_python(*given), strict=True):
            assert torch.equal(one.isfinite().all(), other.isfinite().all())
        if recipe == "rowwise" and name != "down":
            # No other row has it.
            kept = torch.arange(300, device="cuda") != 7
            assert torch.equal(dz[kept], clean[0][kept])


def step(
    recipe: str, activation: str, rows: int, normalization: str, compiled: str = ""
) -> tuple[list[Tensor], list[str]]:
    """Return y and gradients of an MLP with a residual, and the kernels that ran."""
    K, N = 1024, 1552
    count = 1 + is_gate(activation)
    x, r = (matrix(rows, K, seed=s).requires_grad_() for s in (0, 1))
    ws = [(matrix(N, K, seed=2 + i) / K**0.5).requires_grad_() for i in range(count)]
    bs = [matrix(N, seed=4 + i).requires_grad_() for i in range(count)]
    down = (matrix(K, N, seed=6) / N**0.5).requires_grad_()
    gamma, bias = (matrix(K, seed=s).requires_grad_() for s in (7, 8))
    layers: Any = (tuple(ws), tuple(bs)) if count == 2 else (ws[0], bs[0])
    inputs = [x, r, *ws, *bs, down, gamma, bias]

    def mlp() -> Tensor:
        options: Any = {"normalization": normalization, "recipe": recipe, "residual_out": r}
        options |= {"activation": activation, "norm_weight": gamma, "eps": 1e-5}
        found: Tensor = fn.norm_mlp(x, *layers, down, bias, **options)
        return found

    function: Any = mlp
    if compiled:
        torch.compiler.reset()
        function = torch.compile(mlp, backend=compiled, fullgraph=True)

    def gradients() -> list[Tensor]:
        y = function()
        return [y.detach(), *torch.autograd.grad(y, inputs, matrix(*y.shape, seed=9))]

    gradients()
    return ran(gradients)


# PyTorch's own, of 2.11.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("compiled", ["", "aot_eager", "inductor", "fused_norm"])
def test_a_step(
    normalization: str,
    recipe: str,
    activation: str,
    compiled: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients are those of two functions but for roundings, without a pass between products."""
    for rows in (1000, 4096):
        found, names = step(recipe, activation, rows, normalization, compiled)
        assert products(names) == 1, names
        with monkeypatch.context() as patch:
            patch.setattr(normed_linears, "serves", lambda *_: False)
            expected, before = step(recipe, activation, rows, normalization)
        assert products(before) == 0
        # Those of the norm's rows were found together with those of the weights.
        assert passes(names) == passes(before) - 1, (names, before)
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert decibels(one, other) > NEAR[recipe]


@pytest.mark.usefixtures("back_to_back")
@pytest.mark.parametrize(("activation", "layers"), [("gelu", 1), ("swiglu", 2)])
def test_graphs_and_rows_written_just_before(activation: str, layers: int) -> None:
    """No kernel starts with what an earlier one has still to write."""
    t = wide(4000, 256, 1040, 512, activation, layers)

    def run(dy: Tensor) -> Tensor:
        given = arguments(t | {"dy": dy}, activation, "rowwise", False, places(layers))
        return torch.cat([v.flatten() for v in OPS.fp8_mlp_backward(*given)])

    assert_same_in_graphs_and_after_writes(run, t["dy"])
