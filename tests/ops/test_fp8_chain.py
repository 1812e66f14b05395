"""The chain of FP8's kernels: which run, on what, and that results are those of PyTorch's ops.

On a CPU `fp8_kernels` replaces the kernels, with the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ON_HOPPER
from fp8_bounds import matrix
from fp8_kernels import running
from torch import Tensor
from torch.testing._internal.optests import opcheck

import fused_norm as fn
from fused_norm import recipes
from fused_norm.ops import scaled
from fused_norm.ops.eight_bits import quantize
from fused_norm.recipes import E4M3, E5M2, Cast

BF16 = torch.bfloat16
SERVED = ("rowwise", "tensorwise", "rowwise_with_gw_hp", "blockwise")
M, K = 40, 64
OF_8_BITS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
Ran = list[tuple[str, int]]


@pytest.fixture
def ran(tmp_path: Path) -> Iterator[Ran]:
    with running(tmp_path) as names:
        yield names


@pytest.fixture
def twice(tmp_path: Path) -> Callable[..., Any]:
    """Return what gives a call's results by PyTorch's ops and by kernels, and which ran."""

    def both(call: Callable[[], Any]) -> tuple[Any, Any, Ran]:
        expected = call()
        with running(tmp_path) as names:
            found = call()
            return expected, found, [*names]

    return both


def names(ran: Ran) -> list[str]:
    return [name for name, _ in ran]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantization(
    dtype: torch.dtype, scaling: str, power_of_two: bool, twice: Callable[..., Any]
) -> None:
    cast = Cast(dtype, scaling)
    whole = matrix(2 * M, 2 * K + 8)
    views = [whole[:M, :K], whole[:, : K + 8].contiguous(), whole[:33, 1 : K + 1]]
    # Not aligned to 16 bytes, and without elements of its own.
    views += [whole.flatten()[1 : 1 + M * K].view(M, K), whole[:1].expand(M, -1)]
    for v in views:
        for plain, transposed in ((True, False), (False, True), (True, True)):
            how = (cast, power_of_two)
            expected, found, ran = twice(
                lambda v=v, p=plain, t=transposed, how=how: quantize(v, *how, plain=p, transposed=t)
            )
            assert_same(found, expected)
            # One reading for all maxima, and one for both results.
            by_maxima = transposed or scaling == "tensor"
            expected_names = ["maxima", "quantize_by_maxima"] if by_maxima else ["quantize"]
            assert names(ran) == expected_names
            # No result of an op may be another.
            assert len({t.data_ptr() for t in found}) == len(found)


def test_what_kernels_do_not_take_is_left_to_pytorch(ran: Ran) -> None:
    cast = Cast(E4M3, "row")
    for v in (matrix(M, K).float(), matrix(M, K).double(), matrix(0, K), matrix(M, K).half()):
        quantize(v, cast, True)
    quantize(matrix(M, 12), cast, True, transposed=True)
    quantize(matrix(M, 128), Cast(E4M3, "1x128"), True, transposed=True)
    x, w = matrix(M, K), matrix(32, K)
    quantize(matrix(M, 24), Cast(E4M3, "1x128"), True)
    fn.norm_linear(x.float(), w.float(), recipe="rowwise")
    fn.norm_linear(x[:0], w, recipe="rowwise")
    assert not ran


def operands(sizes: tuple[int, ...], has_bias: tuple[bool, ...], k: int = K) -> list[Any]:
    x = matrix(2, M // 2, k).requires_grad_()
    weights = [(matrix(n, k, seed=n) / 8).requires_grad_() for n in sizes]
    pairs = zip(sizes, has_bias, strict=True)
    # Not aligned to 16 bytes.
    biases = [matrix(n + 1, seed=n)[1:].requires_grad_() if has else None for n, has in pairs]
    return [x, weights, biases]


LAYERS: list[tuple[tuple[int, ...], tuple[bool, ...]]] = [
    ((48,), (True,)),
    ((48,), (False,)),
    ((48, 16), (True, True)),
    ((48, 16, 32), (False, False, False)),
    ((48, 16), (True, False)),
    ((16, 32, 48, 64), (True,) * 4),
]


def same_step(
    recipe: str, x: Tensor, weights: list[Tensor], biases: list[Any], twice: Any, **options: Any
) -> Ran:
    """Compute results and gradients both ways, and return what kernels ran."""
    inputs = [t for t in (x, *weights, *biases) if t is not None and t.requires_grad]

    def step() -> list[Tensor]:
        ys = fn.norm_linear(
            x, tuple(weights), tuple(biases), normalization="rms_norm", recipe=recipe, **options
        )
        dys = [matrix(*y.shape, seed=7) for y in ys]
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, inputs, dys)]

    expected, found, ran = twice(step)
    count = len(weights)
    assert_same(found[:count], expected[:count])
    for place, (a, e) in enumerate(zip(found[count:], expected[count:], strict=True)):
        of_bias = inputs[place].dim() == 1
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        # Sums of rows have an order of their own, and those of gradients are rounded elsewhere.
        assert torch.equal(a, e) if not of_bias else torch.allclose(a, e, rtol=0.02, atol=0.02)
    return ran


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_steps(recipe: str, layers: Any, twice: Any) -> None:
    x, weights, biases = operands(*layers)
    if len(weights) == 1:
        weights, biases = [*weights, *weights], [*biases, *biases]
    ran = same_step(recipe, x, weights, biases, twice)
    count, how = len(weights), recipes.find(recipe)
    products = names(ran).count("linear")
    together = count <= 3 and len({b is None for b in biases}) == 1 and recipe != "blockwise"
    assert ("linears" in names(ran)) == together
    # Each layer has its product with the weight; up to three share that of their gradients.
    of_weights = how.has_fp8_wgrad * (1 if count <= 3 else count)
    assert products == count * ((not together) + 1) + of_weights
    # Nothing says that an earlier call made what is multiplied.
    assert not any(strategy for _, strategy in ran)


def test_steps_of_many_blocks(twice: Any) -> None:
    """Whole blocks and a part of one, along each side."""
    x, weights, biases = operands((272, 400), (True, False), 304)
    ran = names(same_step("blockwise", x, weights, biases, twice))
    # Rows once, both weights, and both gradients; no columns.
    assert ran.count("quantize") == 5
    assert ran.count("linear") == 4
    assert set(ran) == {"quantize", "linear"}


@pytest.mark.parametrize("recipe", SERVED)
def test_only_what_is_wanted_is_computed(recipe: str, twice: Any) -> None:
    has_fp8_wgrad = recipes.find(recipe).has_fp8_wgrad
    x, weights, biases = operands((48, 16), (True, True))
    for place in range(5):
        flags = [place == i for i in range(5)]
        for t, flag in zip((x, *weights, *biases), flags, strict=True):
            t.requires_grad_(flag)
        ran = names(same_step(recipe, x, weights, biases, twice))
        # Products with scales of blocks are not grouped, in the forward either.
        forward = 0 if "linears" in ran else 2
        assert (forward == 2) == (recipe == "blockwise")
        expected = (2, has_fp8_wgrad, has_fp8_wgrad, 0, 0)[place]
        assert ran.count("linear") == forward + expected


def test_layers_that_are_not_used_have_no_gradients(ran: Ran) -> None:
    x, weights, biases = operands((48, 16), (True, True))
    first, _ = fn.norm_linear(x, tuple(weights), tuple(biases), recipe="rowwise")
    ran.clear()
    found = torch.autograd.grad(
        first.sum(), (x, *weights, *biases), allow_unused=True, retain_graph=True
    )
    assert [g is None for g in found] == [False, False, True, False, True]
    assert names(ran).count("linear") == 2
    # What autograd knows to be zero has no memory.
    with torch.no_grad():
        zero = torch._efficientzerotensor(first.shape, dtype=BF16)
    dx, dweight = torch.autograd.grad(first, (x, weights[0]), zero)
    assert not dx.any()
    assert not dweight.any()


CALLS: list[dict[str, Any]] = [
    {},
    {"normalization": "rms_norm", "weight_offset": 1.0, "norm_weight": "bf16"},
    {"norm_weight": "f32", "norm_bias": "f32", "residual": True, "return_sum": True},
    {"activation": "gelu"},
    {"activation": "swiglu", "residual": True},
]


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_inference(recipe: str, options: dict[str, Any], has_bias: bool, ran: Ran) -> None:
    x, w, b = matrix(2, 20, K), matrix(64, K, seed=1) / 8, matrix(65, seed=2)[1:]
    kwargs: dict[str, Any] = {**options, "recipe": recipe}
    for name in ("norm_weight", "norm_bias"):
        if name in options:
            kwargs[name] = matrix(K + 1, seed=3)[1:].to(BF16 if options[name] == "bf16" else None)
            kwargs[name] = kwargs[name].float() if options[name] == "f32" else kwargs[name]
    if "residual" in options:
        kwargs["residual"] = matrix(2, 20, K, seed=4)
    found = fn.norm_linear(x, w, b if has_bias else None, **kwargs)
    assert "linear" in names(ran)
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    exact = fn.norm_linear(
        x.double(), w.double(), b.double() if has_bias else None, **wide | {"recipe": None}
    )
    results = [(found, exact)] if isinstance(found, Tensor) else zip(found, exact, strict=True)
    for a, e in results:
        assert a.dtype is BF16
        assert (a.double() - e).norm() < 0.08 * e.norm()


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mlp(recipe: str, residual: bool, activation: str, ran: Ran) -> None:
    layer = fn.LayerNormMLP(K, 128, activation=activation, recipe=recipe, dtype=BF16)
    x = matrix(2, 20, K)
    more = {"residual_out": x} if residual else {}
    with torch.no_grad():
        found = layer(x, **more)
        assert names(ran).count("linear") == 2
        expected = layer.double()(x.double(), **{k: v.double() for k, v in more.items()})
    assert (found.double() - expected).norm() < 0.1 * expected.norm()


def test_frozen_weights_are_there_before_the_rows(ran: Ran) -> None:
    layer = fn.LayerNormLinear(K, 48, recipe="rowwise", dtype=BF16).eval()
    x = matrix(M, K)
    with torch.no_grad():
        fn.freeze(layer)
        expected = layer(x)
        ran.clear()
        assert torch.equal(layer(x), expected)
        assert [name for name, _ in ran] == ["normalize", "linear"]
        assert ran[-1][1] != 0
        fn.unfreeze(layer)
    layer.train()
    with fn.frozen_parameters(layer):
        for _ in range(2):
            ran.clear()
            y = layer(x.requires_grad_())
            y.backward(matrix(*y.shape))
        # The rows and their gradient, both ways: no weight.
        assert names(ran).count("quantize") == 0
        assert names(ran).count("quantize_by_maxima") == 2


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_rows_are_quantized_once_where_a_graph_has_frozen_weights(recipe: str, ran: Ran) -> None:
    """Ops of a graph see that weights are frozen before they launch anything."""
    layer = fn.LayerNormMLP(K, 64, activation="gelu", recipe=recipe, dtype=BF16)
    x = matrix(M, K).requires_grad_()

    def step(run: Any) -> list[Tensor]:
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y, x, matrix(*y.shape))]

    run = torch.compile(layer, backend="aot_eager")
    with fn.frozen_parameters(layer):
        step(layer)
        expected = step(layer)
        ran.clear()
        step(layer)
        eager = names(ran)
        step(run)
        ran.clear()
        found = step(run)
    assert all(map(torch.equal, found, expected))
    assert sorted(names(ran)) == sorted(eager)


HOW = [("row", "row"), ("tensor", "tensor"), ("1x128", "128x128")]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_residual_is_added_before_the_only_rounding(
    how: tuple[str, str], has_bias: bool, ran: Ran
) -> None:
    N = 48
    rows = quantize(matrix(M, K), Cast(E4M3, how[0]), True)
    layer = quantize(matrix(N, K, seed=1) / 8, Cast(E4M3, how[1]), True)
    bias = matrix(N, seed=2) if has_bias else None
    whole = matrix(2 * M, 2 * N, seed=3)
    # Dense; rows and columns of others; not aligned to 16 bytes; without elements of its own.
    residuals = [whole[:M, :N].contiguous(), whole[::2, 1 : N + 1], whole[:N, :M].t()]
    residuals += [whole.flatten()[1 : 1 + M * N].view(M, N), whole[:1, :N].expand(M, -1)]
    for residual in residuals:
        given = (*rows, *layer, *how, True, bias, residual, "", BF16, None, None, None, False)
        expected = torch.ops.fused_norm.fp8_linear_by_python(*given)
        twice_rounded = scaled.linear(*given[:8], None, "", BF16) + residual
        ran.clear()
        found = scaled.linear(*given[:8], residual, "", BF16)
        assert names(ran) == ["linear"]
        assert_same([found], [expected])
        assert not torch.equal(found, twice_rounded)


def test_what_no_kernel_adds_is_left_to_pytorch(ran: Ran) -> None:
    """That is what an activation would follow; rows of e5m2 have a residual as those of e4m3."""
    by = quantize(matrix(48, K, seed=1), Cast(E4M3, "row"), True)
    residual = matrix(M, 48, seed=2)
    rows = quantize(matrix(M, K), Cast(E4M3, "row"), True)
    given = (*rows, *by, "row", "row", True, None, residual, "gelu", BF16)
    expected = torch.ops.fused_norm.fp8_linear_by_python(*given, None, None, None, False)
    ran.clear()
    assert_same([scaled.linear(*given)], [expected])
    assert not ran
    rows = quantize(matrix(M, K), Cast(E5M2, "row"), True)
    y = scaled.linear(*rows, *by, "row", "row", True, None, None, "", BF16)
    assert names(ran) == ["quantize", "linear"]
    exact = recipes.product(rows, "row", by, "row") + residual.float()
    found = scaled.linear(*rows, *by, "row", "row", True, None, residual, "", BF16)
    assert names(ran) == ["quantize", "linear", "linear"]
    assert_same([found], [exact.to(BF16)])
    assert not torch.equal(found, y)


def test_others_are_told_apart(ran: Ran) -> None:
    """What has another dtype, device or size is no kernel's, and PyTorch says what is wrong."""
    q, scale = quantize(matrix(M, K), Cast(E4M3, "row"), True)
    w = quantize(matrix(48, K), Cast(E4M3, "row"), True)
    ran.clear()
    how = ("row", "row", True)

    def call(q: Tensor, w: Tensor, w_scale: Any, bias: Any = None, residual: Any = None) -> Tensor:
        return scaled.linear(q, scale, w, w_scale, *how, bias, residual, "", BF16)

    assert call(q, *w, matrix(48), matrix(M, 48)).dtype is BF16
    assert names(ran) == ["linear"]
    ran.clear()
    # Biases and residuals of other dtypes and those that broadcast are added by PyTorch's ops.
    exact = call(q, *w)
    ran.clear()
    for bias in (torch.ones(48), torch.ones(1).bfloat16()):
        torch.testing.assert_close(call(q, *w, bias), exact + 1, rtol=0.02, atol=0.02)
    for residual in (torch.ones(M, 48), torch.ones(48).bfloat16()):
        torch.testing.assert_close(call(q, *w, None, residual), exact + 1, rtol=0.02, atol=0.02)
    assert not ran
    wrong: list[tuple[Any, ...]] = [
        (q[:, :48], *w),
        (q, w[0][:, :48].contiguous(), w[1]),
        (q, *w, matrix(32)),
        (q, w[0], w[1][:3]),
    ]
    for arguments in wrong:
        with pytest.raises(RuntimeError):
            call(*arguments)
    assert not ran


@pytest.mark.gpu
@ON_HOPPER
def test_operands_of_another_device_are_errors() -> None:
    x, w, b = matrix(M, K).cuda(), matrix(48, K).cuda(), matrix(48).cuda()
    q, scale = quantize(x, Cast(E4M3, "row"), True)
    how = (None, "row", "row", True)
    for operands in ((x, w.cpu(), b), (x.cpu(), w, b), (x, w, b.cpu())):
        with pytest.raises(RuntimeError):
            fn.norm_linear(*operands, recipe="rowwise")
    for weight, bias in ((w.cpu(), b), (w, b.cpu())):
        with pytest.raises(RuntimeError):
            scaled.linear(q, scale, weight, *how, bias, None, "", BF16)


def test_registration(ran: Ran) -> None:
    x, weights, biases = operands((48, 16), (True,) * 2)
    x, weights, biases = x.detach(), [w.detach() for w in weights], [b.detach() for b in biases]
    none = [None, None]
    flags = (False, True)
    for scaling, *keeps in itertools.product(("row", "tensor"), flags, flags):
        how = (scaling, scaling, True, BF16, False, "", False, *keeps)
        forward = (x, weights, none, biases, *how)
        # PyTorch does not compare numbers of 8 bits.
        opcheck(torch.ops.fused_norm.fp8_layers.default, forward, test_utils=OF_8_BITS)
    dys: list[Any] = [matrix(2, M // 2, n) for n in (48, 16)]
    for unused, wanted in itertools.product((False, True), ([0, 1, 2, 3, 4], [0], [1, 3])):
        given = [dys[0], None] if unused else dys
        kept = [place for place in wanted if not (unused and place in (2, 4))]
        how = ("row", False, "row", "row", True, True, kept, False)
        rows = quantize(x.view(M, K), Cast(E4M3, "row"), True, plain=False, transposed=True)
        for z in ([x, None], rows):
            operands_ = (*z, None, "", given, weights, none, *how)
            opcheck(
                torch.ops.fused_norm.fp8_layers_backward.default, operands_, test_utils=OF_8_BITS
            )
    assert ran


@pytest.mark.parametrize("recipe", SERVED)
def test_compiled_steps(recipe: str, ran: Ran) -> None:
    x, weights, biases = operands((48, 16), (True, True))

    def step() -> tuple[Tensor, ...]:
        ys = fn.norm_linear(x, tuple(weights), tuple(biases), recipe=recipe)
        loss = sum(y.float().square().sum() for y in ys)
        return torch.autograd.grad(loss, (x, *weights, *biases))

    expected = step()
    ran.clear()
    found = torch.compile(step, backend="aot_eager")()
    assert ("linear" if recipe == "blockwise" else "linears") in names(ran)
    for a, e in zip(found, expected, strict=True):
        assert torch.equal(a, e)
