"""Gradients of an FP8 layer's result that come in parts: the bits of the concatenated gradient."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_bounds import matrix
from fp8_kernels import Ran, running
from test_fp8_chain import assert_same
from torch import Tensor
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm.call.record import MOST_MATRICES
from fused_norm.models.output_parts import splits_outputs
from fused_norm.ops import normed_linears
from fused_norm.ops.eight_bits import quantize
from fused_norm.ops.output_parts import norm_linear_in_parts
from fused_norm.recipes import E4M3, RECIPES, Cast

BF16 = torch.bfloat16
OPS = torch.ops.fused_norm
K = 64
# Rows, and the columns of each part.
PARTS = [(40, (32, 16)), (1, (48, 16, 32)), (17, (16, 16, 272)), (2, (16,) * 8)]
CASTS = [("row", False), ("row", True), ("tensor", False), ("tensor", True)]
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def backward(
    dys: list[Any],
    scaling: str = "row",
    is_e5m2: bool = False,
    wanted: tuple[int, ...] = (0, 1, 2),
    in_8_bits: bool = False,
    has_fp8_wgrad: bool = True,
) -> tuple[Any, ...]:
    """Return arguments of `fp8_layers_backward` of one layer."""
    given = [dy for dy in dys if dy is not None]
    rows, N = given[0].shape[:-1], sum(dy.shape[-1] for dy in given)
    z, weight = matrix(*rows, K, seed=20), matrix(N, K, seed=21) / 8
    by: Any = (z, None)
    if in_8_bits:
        by = quantize(z.flatten(0, -2), Cast(E4M3, scaling), True, plain=False, transposed=True)
    weight_scaling = {"1x128": "128x128"}.get(scaling, scaling)
    how = (scaling, is_e5m2, weight_scaling, scaling, True, has_fp8_wgrad)
    return (*by, None, "", dys, [weight], [None], *how, [*wanted], False)


def gradients(rows: tuple[int, ...], sizes: tuple[int, ...]) -> list[Tensor]:
    """Return gradients of parts, the largest magnitudes in none for all rows and columns."""
    return [matrix(*rows, n, seed=i) for i, n in enumerate(sizes)]


def both(dys: list[Tensor], folder: Path, **how: Any) -> tuple[list[Tensor], list[Tensor], Ran]:
    """Return gradients from those of parts and from the concatenated one, and what ran before."""
    whole, parts = backward([torch.cat(dys, -1)], **how), backward(dys, **how)
    with running(folder):
        expected = OPS.fp8_layers_backward(*whole)
    with running(folder) as ran:
        found = OPS.fp8_layers_backward(*parts)
    return found, expected, ran


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_bits(parts: Any, cast: tuple[str, bool], tmp_path: Path) -> None:
    M, sizes = parts
    wanted = [(0, 1, 2), (0,), (1,), (2, 0)]
    for in_8_bits, places in itertools.product((False, True), wanted):
        how: Any = {"scaling": cast[0], "is_e5m2": cast[1], "wanted": places}
        how["in_8_bits"] = in_8_bits
        found, expected, ran = both(gradients((M,), sizes), tmp_path, **how)
        assert_same(found, expected)
        by_python = OPS.fp8_layers_backward_by_python(*backward(gradients((M,), sizes), **how))
        # Sums of rows have an order of their own.
        is_sum = [place == 2 for place in places]
        for one, other, sums in zip(found, by_python, is_sum, strict=True):
            assert torch.equal(one, other) or (sums and torch.allclose(one, other, rtol=0.02))
        launches = Counter(name for name, _ in ran)
        # The weight is transposed with the parts, and the rows if they are not in 8 bits.
        others = (0 in places) + (1 in places and not in_8_bits)
        matrices = len(sizes) + others
        assert ran.matrices == {"maxima": matrices, "quantize_by_maxima": matrices}
        # One launch quantizes to one type.
        is_more = others > 0 if cast[1] else matrices > MOST_MATRICES
        assert launches["maxima"] == launches["quantize_by_maxima"] == 1 + is_more


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_what_is_no_number_and_zeros(cast: tuple[str, bool], tmp_path: Path) -> None:
    for place, number in itertools.product(range(3), (torch.nan, torch.inf, -torch.inf)):
        dys = gradients((40,), (32, 16, 48))
        for dy in dys:
            dy[7] = 0
        dys[place][-1, 3] = number
        dys[(place + 1) % 3].zero_()
        found, expected, _ = both(dys, tmp_path, scaling=cast[0], is_e5m2=cast[1])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.nan_to_num(3, 4, 5), other.nan_to_num(3, 4, 5))
        assert not found[0][-1].isfinite().any()


def test_layouts(tmp_path: Path) -> None:
    """Parts of several dimensions, with rows of others, or not aligned to 16 bytes."""
    whole = matrix(2, 12, 128)
    dense = [whole[..., :32].contiguous(), whole[..., 32:48].contiguous()]
    strided = [whole[..., :32], whole[..., 32:48]]
    shifted = [matrix(2 * 12 * 32 + 1)[1:].view(2, 12, 32), matrix(12, 2, 16).transpose(0, 1)]
    for dys in (dense, strided, shifted):
        found, expected, ran = both(dys, tmp_path)
        assert_same(found, expected)
        assert found[0].shape == (2, 12, K)
        assert ran.matrices["quantize_by_maxima"] == 4


@pytest.mark.parametrize(
    ("sizes", "how", "matrices"),
    [
        # A size that is not a multiple of 16, and more parts than a launch takes.
        ((24, 40), {}, 3),
        ((16,) * 9, {}, 3),
        # A product in bfloat16 reads the gradient as it is; not if there is none.
        ((32, 16), {"has_fp8_wgrad": False}, 1),
        ((32, 16), {"has_fp8_wgrad": False, "wanted": (0, 2)}, 3),
        # Scales of blocks.
        ((32, 96), {"scaling": "1x128", "has_fp8_wgrad": False}, 0),
    ],
    ids=str,
)
def test_what_is_concatenated(
    sizes: tuple[int, ...], how: dict[str, Any], matrices: int, tmp_path: Path
) -> None:
    found, expected, ran = both(gradients((40,), sizes), tmp_path, **how)
    assert_same(found, expected)
    assert ran.matrices["quantize_by_maxima"] == matrices


def test_others_are_errors() -> None:
    dys = gradients((40,), (32, 16))
    arguments = backward(dys)
    for wrong in ([dys[0], None], [dys[0], dys[0]], [*dys, dys[1]]):
        given = (*arguments[:4], wrong, *arguments[5:])
        with pytest.raises(RuntimeError, match="parts of 48 outputs"):
            OPS.fp8_layers_backward(*given)
    given = (*arguments[:4], [*dys, dys[0]], arguments[5] * 2, arguments[6] * 2, *arguments[7:])
    with pytest.raises(RuntimeError, match="gradients of parts"):
        OPS.fp8_layers_backward(*given)
    with pytest.raises(RuntimeError):
        OPS.fp8_layers_backward(*backward([dys[0], dys[1][:39]]))


def test_registration(tmp_path: Path) -> None:
    with running(tmp_path):
        for wanted, in_8_bits in itertools.product(((0, 1, 2), (0,), (1,), (2,)), (False, True)):
            given = backward(gradients((2, 20), (32, 16)), wanted=wanted, in_8_bits=in_8_bits)
            opcheck(OPS.fp8_layers_backward.default, given, test_utils=OF_8_BITS)


SIZES = (32, 16, 48)


def tensors(rows: tuple[int, ...] = (2, 20)) -> dict[str, Tensor]:
    shapes = {"x": (*rows, K), "weight": (96, K), "bias": (96,), "norm_weight": (K,)}
    found = {name: matrix(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {name: v.requires_grad_() for name, v in found.items()}


def step(in_parts: bool, recipe: str, used: tuple[int, ...], **options: Any) -> list[Any]:
    """Return results of a call, and gradients from those that are used."""
    p = tensors()
    options |= {"normalization": "rms_norm", "norm_weight": p["norm_weight"], "recipe": recipe}
    if in_parts:
        results = [*norm_linear_in_parts(p["x"], p["weight"], p["bias"], SIZES, **options)]
    else:
        found = fn.norm_linear(p["x"], p["weight"], p["bias"], **options)
        whole, *others = found if isinstance(found, tuple) else (found,)
        results = [*whole.split(SIZES, -1), *others]
    dys = [matrix(*results[i].shape, seed=i) for i in used]
    inputs = [*p.values(), *[v for v in (options.get("residual"),) if v is not None]]
    ys = [results[i] for i in used]
    return [*results, *torch.autograd.grad(ys, inputs, dys, allow_unused=True)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,), (0, 2), (0, 2, 3), (3,)], ids=str)
def test_calls(
    recipe: str,
    is_normed: bool,
    by_kernels: bool,
    used: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(normed_linears, "serves", lambda *_: is_normed)
    options: Any = {}
    if 3 in used:
        options = {"residual": matrix(2, 20, K, seed=9).requires_grad_(), "return_sum": True}

    def run(in_parts: bool) -> list[Any]:
        if not by_kernels:
            return step(in_parts, recipe, used, **options)
        with running(tmp_path):
            return step(in_parts, recipe, used, **options)

    for one, other in zip(run(True), run(False), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same([one.detach()], [other.detach()])


def test_other_calls() -> None:
    """Without gradients, with other results, in the mode, and of frozen weights."""
    p = tensors()
    options: Any = {"norm_weight": p["norm_weight"], "return_norm": True}
    with torch.no_grad():
        *parts, z = norm_linear_in_parts(
            p["x"], p["weight"], p["bias"], SIZES, recipe="rowwise", **options
        )
        y, norm = fn.norm_linear(p["x"], p["weight"], p["bias"], recipe="rowwise", **options)
        assert_same([*parts, z], [*y.split(SIZES, -1), norm])
        with fn.autocast_fp8("tensorwise"):
            in_mode = norm_linear_in_parts(p["x"], p["weight"], None, SIZES)
            without = norm_linear_in_parts(p["x"], p["weight"], None, SIZES, recipe="")
        expected = fn.norm_linear(p["x"], p["weight"], recipe="tensorwise")
        assert_same([*in_mode], [*expected.split(SIZES, -1)])
        assert_same([*without], [*fn.norm_linear(p["x"], p["weight"]).split(SIZES, -1)])
    used = (0, 1, 2)
    expected = step(False, "rowwise", used, return_norm=True)
    assert_same(step(True, "rowwise", used, return_norm=True), expected)


def test_which_calls_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in bfloat16 on Hopper whose gradients kernels quantize in parts."""

    class OnHopper:
        is_cuda, dtype = True, BF16

    x: Any = OnHopper()
    monkeypatch.setattr("fused_norm.models.output_parts.serves", lambda *_: True)
    found = {recipe: splits_outputs(x, SIZES, False, recipe) for recipe in RECIPES}
    wanted = {"rowwise": True, "tensorwise": True, "rowwise_with_gw_hp": False, "blockwise": False}
    assert found == wanted
    assert not splits_outputs(x, (*SIZES, 16), False, "rowwise")
    x.dtype = torch.float16
    assert not splits_outputs(x, SIZES, False, "rowwise")
    x.dtype = BF16
    monkeypatch.setattr("fused_norm.models.output_parts.serves", lambda *_: False)
    assert not splits_outputs(x, SIZES, False, "rowwise")
    assert not splits_outputs(matrix(4, K), SIZES, False, "rowwise")
