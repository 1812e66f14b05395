"""FP8: every recipe against float64 and torchao, and its edge cases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp8_products import (
    LEAST,
    LEAST_OF_E5M2,
    SHORT,
    TORCHAO,
    K,
    M,
    N,
    decibels,
    gradients,
    in_torchao,
    leaves,
)
from torch import Tensor, nn
from torch.autograd import forward_ad

import fused_norm as fn
from fused_norm import composition, recipes
from fused_norm.call import contexts, frozen
from fused_norm.ops import autocast_fp8, fp8, scaled
from fused_norm.ops.rounding import RoundedToOdd
from fused_norm.recipes import E4M3, E5M2, Cast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_products_against_float64(recipe: str, dtype: torch.dtype) -> None:
    tensors = leaves(dtype)
    found = gradients(lambda x, w, b: fp8.scaled_linear(x, w, b, recipe=recipe), *tensors)
    exact = gradients(F.linear, *(v.double() for v in tensors))
    least = dict.fromkeys(("y", "dx", "dweight"), LEAST)
    if recipes.find(recipe).grad.dtype is E5M2:
        least |= {"dx": LEAST_OF_E5M2, "dweight": LEAST_OF_E5M2}
    for name, a, e in zip(("y", "dx", "dweight"), found, exact, strict=False):
        assert a.dtype is dtype
        assert decibels(a, e) > least[name], name
    assert decibels(found[3], exact[3]) > 50
    if not recipes.find(recipe).has_fp8_wgrad:
        assert decibels(found[2], exact[2]) > 50


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", TORCHAO)
def test_products_are_no_worse_than_those_of_torchao(recipe: str, seed: int) -> None:
    tensors = leaves(torch.bfloat16, seed)
    found = gradients(lambda x, w, b: fp8.scaled_linear(x, w, b, recipe=recipe), *tensors)
    theirs = gradients(lambda x, w, b: in_torchao(recipe, x, w, b), *tensors)
    exact = gradients(F.linear, *(v.double() for v in tensors))
    for name, a, t, e in zip(("y", "dx", "dweight"), found, theirs, exact, strict=False):
        assert decibels(a, e) > decibels(t, e) - SHORT, name


# Scales of the first two are powers of two, which those of a tensor are not.
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("compiles", [False, True])
def test_weights_under_autocast_are_rounded_once(recipe: str, compiles: bool) -> None:
    """Of a weight in float32, as torchao has it: rounded to bfloat16 first, some would differ."""
    x, w, b, dy = leaves(torch.float32)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fp8.scaled_linear(x, w, b, recipe=recipe)

    function = torch.compile(ours, backend="aot_eager") if compiles else ours
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(function, x.bfloat16(), w, b, dy)
        theirs = gradients(lambda *t: in_torchao(recipe, *t), x.bfloat16(), w, b, dy)
    for a, t in zip(found[:3], theirs[:3], strict=True):
        assert a.dtype is t.dtype
        # torchao rounds a product before it adds a bias.
        assert decibels(a, t) > 46
    assert torch.equal(found[1], theirs[1])


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_bits_are_those_of_torchao(scaling: str, dtype: torch.dtype, power_of_two: bool) -> None:
    pytest.importorskip("torchao")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    if scaling == "row" and not power_of_two:
        pytest.skip("torchao's training always rounds the scales of rows")
    torch.manual_seed(1)
    v = (torch.randn(300, K) * torch.logspace(-9, 9, 300)[:, None]).bfloat16()
    v[7] = 0
    by_row = scaling == "row"
    granularity = ScalingGranularity.AXISWISE if by_row else ScalingGranularity.TENSORWISE
    theirs = hp_tensor_to_float8_dynamic(
        v,
        dtype,
        LinearMMConfig(),
        scaling_granularity=granularity,
        axiswise_dim=-1 if by_row else None,
        round_scales_to_power_of_2=power_of_two,
    )
    q, scale = recipes.quantize(v, Cast(dtype, scaling), power_of_two)
    assert torch.equal(q.view(torch.uint8), theirs._data.view(torch.uint8))
    assert torch.equal(scale.flatten(), theirs._scale.float().reciprocal().flatten())


def test_scales_are_rounded_up_to_powers_of_two() -> None:
    largest = 448 * 2.0 ** torch.arange(-120, 110).float()
    amax = torch.cat([largest, largest.nextafter(torch.tensor(torch.inf)), largest * 0.75])
    scale = recipes.scale_of(amax.clamp_min(recipes.LEAST), E4M3, True)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    exact = amax.clamp_min(recipes.LEAST).double() / 448
    assert (scale.double() >= exact).all()
    assert (scale.double() < 2 * exact).all()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalization": "rms_norm", "weight_offset": 1.0},
    {"activation": "gelu"},
    {"activation": "swiglu", "residual": True, "return_sum": True},
    {"scale": True, "shift": True},
    {"return_norm": True},
]


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("follows", [False, True])
def test_family_against_float64(recipe: str, options: dict[str, Any], follows: bool) -> None:
    torch.manual_seed(5)
    rows = {name: torch.randn(M, K) for name in ("residual", "scale", "shift") if name in options}
    kwargs = {**options, **rows, "norm_weight": torch.rand(K), "recipe": recipe}
    x, w, b = torch.randn(M, K), torch.randn(N, K) / K**0.5, torch.randn(N)
    with torch.set_grad_enabled(follows):
        results = fn.norm_linear(x, w.requires_grad_(follows), b, **kwargs)
    exact = fn.norm_linear(
        x.double(),
        w.double(),
        b.double(),
        **{k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        | {"recipe": None},
    )
    results, exact = ((v,) if isinstance(v, Tensor) else v for v in (results, exact))
    assert len(results) == len(exact)
    for place, (a, e) in enumerate(zip(results, exact, strict=True)):
        # A gate multiplies two products, with the errors of both.
        assert decibels(a, e) > (LEAST - 3 if place == 0 else 100)


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_mlp_gradients(recipe: str) -> None:
    torch.manual_seed(6)
    layer = fn.LayerNormMLP(K, N, activation="swiglu", normalization="RMSNorm", recipe=recipe)
    exact = fn.LayerNormMLP(K, N, activation="swiglu", normalization="RMSNorm", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(M, K)
    one, other = x.clone().requires_grad_(), x.double().requires_grad_()
    y, e = layer(one, residual_out=one), exact(other, residual_out=other)
    dy = torch.randn(M, K)
    y.backward(dy)
    e.backward(dy.double())
    assert decibels(y, e) > LEAST
    # Four products of FP8 lie between, and their errors add up.
    assert decibels(one.grad, other.grad) > LEAST - 6
    for (name, p), q in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert decibels(p.grad, q.grad) > LEAST - 8, name


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_a_gate_of_two_layers(
    recipe: str, dtype: torch.dtype, biases: tuple[bool, bool], device: str
) -> None:
    torch.manual_seed(7)
    # Few rows have a kernel of their own.
    for rows in (M, 3):
        x, w, v = torch.randn(rows, K), torch.randn(N, K) / 16, torch.randn(N, K) / 4
        layers = [torch.randn(N) if has else None for has in biases]
        x, w, v, *layers = (None if t is None else t.to(device, dtype) for t in (x, w, v, *layers))
        options = {"activation": "swiglu", "recipe": recipe}
        found = fn.norm_linear(x, (w, v), layers, **options)
        z = F.layer_norm(x.double(), (K,))
        gate, up = (
            F.linear(z, weight.double(), None if bias is None else bias.double())
            for weight, bias in zip((w, v), layers, strict=True)
        )
        exact = F.silu(gate) * up
        assert found.dtype is dtype
        # A gate multiplies two products, with the errors of both.
        assert decibels(found, exact) > LEAST - 3
        # As with gradients, which take two products; except for a weight that is trained.
        follows = fn.norm_linear(x.clone().requires_grad_(), (w, v), layers, **options)
        assert decibels(found, follows) > (30 if dtype is torch.bfloat16 else 80)


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_layers_of_one_norm_quantize_its_rows_once(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b, dy = leaves(torch.float32)
    v, c = torch.randn(N, K).requires_grad_(), torch.randn(N).requires_grad_()
    names = {"norm_weight": torch.rand(K), "recipe": recipe}
    inputs = (x, w, b, v, c)
    alone = [fn.norm_linear(x, *layer, **names) for layer in ((w, b), (v, c))]
    expected = torch.autograd.grad(alone, inputs, (dy, dy.flip(0)))
    count = []
    quantize = recipes.quantize
    monkeypatch.setattr(recipes, "quantize", lambda t, *a: count.append(t.shape) or quantize(t, *a))
    together = fn.norm_linear(x, (w, v), (b, c), **names)
    found = torch.autograd.grad(together, inputs, (dy, dy.flip(0)), retain_graph=True)
    assert all(torch.equal(a, e) for a, e in zip(together, alone, strict=True))
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)
    # Rows and two weights; two gradients and two weights; and for the weights' gradients the rows
    # and two gradients.
    assert len(count) == 3 + 4 + 3 * recipes.find(recipe).has_fp8_wgrad
    # A layer that takes no part has no gradient: AdamW would let it decay.
    grads = torch.autograd.grad(together[0], inputs, dy, allow_unused=True)
    assert [g is None for g in grads] == [False, False, False, True, True]
    assert torch.equal(grads[1], expected[1])


def test_autocast_fp8_is_that_of_its_block_and_never_on_by_default() -> None:
    layer = fn.LayerNormLinear(K, N)
    x = torch.randn(M, K)
    with torch.no_grad():
        plain = layer(x)
        with fn.autocast_fp8("tensorwise"):
            inner = layer(x)
            with fn.autocast_fp8("rowwise"):
                rowwise = layer(x)
            assert torch.equal(layer(x), inner)
        assert torch.equal(layer(x), plain)
        given = fn.LayerNormLinear(K, N, recipe="rowwise")
        given.load_state_dict(layer.state_dict())
        assert torch.equal(given(x), rowwise)
    assert not torch.equal(plain, inner)
    assert not torch.equal(rowwise, inner)


def test_compiled_calls_have_the_recipe_of_the_innermost_block() -> None:
    """Regression: leaving a block ended the first one of its recipe, not the last one entered."""
    layer = fn.LayerNormLinear(K, N)
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(M, K)
    with torch.no_grad(), fn.autocast_fp8("rowwise"), fn.autocast_fp8("tensorwise"):
        with fn.autocast_fp8("rowwise"):
            assert torch.equal(compiled(x), layer(x))
        assert torch.equal(compiled(x), layer(x))


def test_a_block_that_another_task_leaves_ends_for_compiled_calls() -> None:
    def inside() -> Iterator[None]:
        with fn.autocast_fp8("tensorwise"):
            yield

    entered = inside()
    copy_context().run(next, entered)
    assert autocast_fp8.state() == (None, "tensorwise")
    with pytest.raises(ValueError, match="different Context"):
        entered.close()
    assert autocast_fp8.state() == (None, None)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")
@pytest.mark.parametrize("kind", ["linear", "activation", "mlp"])
@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_derivatives_of_gradients_and_tangents_are_errors(kind: str, recipe: str) -> None:
    """Regression: a penalty on gradients had no gradient itself, and a tangent became zeros."""
    x, w, *_ = leaves(torch.float32)

    def call(x: Tensor) -> Tensor:
        if kind == "mlp":
            y: Tensor = fn.norm_mlp(x, w, None, w.t(), activation="gelu", recipe=recipe)
            return y
        activation = "gelu" if kind == "activation" else None
        y = fn.norm_linear(x, w, activation=activation, recipe=recipe)
        return y

    for loss in (call(x).sum(), call(x).square().sum()):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="no derivatives of gradients"):
            (loss + dx.square().sum()).backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(call, (x,), (x,))
    y = call(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_under_autocast_rows_have_its_dtype(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: norms give float32 there, which no kernel quantizes; `F.linear` casts it, too."""
    seen: list[torch.dtype] = []
    quantize = recipes.quantize

    def counted(v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        seen.append(v.dtype)
        return quantize(v, *rest)

    monkeypatch.setattr(recipes, "quantize", counted)
    x, w, b, dy = leaves(torch.float32)
    narrow = [v.detach().bfloat16() for v in (x, w, b, dy)]
    if recipes.find(recipe).power_of_two:
        narrow[1] = RoundedToOdd.apply(w.detach())
    expected = gradients(lambda *t: fp8.scaled_linear(*t, recipe=recipe), *narrow)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8.scaled_linear(x, w, b, recipe=recipe)
    y.backward(narrow[3])
    assert set(seen) == {torch.bfloat16}
    for found, e in zip((y, x.grad, w.grad, b.grad), expected, strict=True):
        assert torch.equal(found, e.to(found.dtype))


def test_backward_has_the_recipe_of_its_forward() -> None:
    x, w, b, dy = leaves(torch.float32)
    with fn.autocast_fp8("rowwise"):
        y = fn.norm_linear(x, w, b)
    with fn.autocast_fp8("tensorwise"):
        y.backward(dy)
    expected = gradients(lambda *t: fn.norm_linear(*t, recipe="rowwise"), x, w, b, dy)
    assert torch.equal(w.grad, expected[2])


def test_main_grad_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(7)
    x = torch.randn(M, K)
    layers = [
        fn.LayerNormLinear(K, N, recipe="rowwise", fuse_wgrad_accumulation=fused)
        for fused in (False, True)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].weight.main_grad = torch.zeros(N, K)
    layers[0](x).square().sum().backward()
    layers[1](x).square().sum().backward()
    assert layers[1].weight.grad is None
    torch.testing.assert_close(layers[1].weight.main_grad, layers[0].weight.grad)
    for reentrant in (False, True):
        before = layers[0].weight.grad.clone()
        layers[0].zero_grad()
        again = checkpoint(layers[0], x.clone().requires_grad_(), use_reentrant=reentrant)
        again.square().sum().backward()
        assert torch.equal(layers[0].weight.grad, before)


def test_frozen_weights_are_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    quantize = recipes.quantize

    def counted(v: Tensor, *rest: Any) -> Any:
        calls.append(tuple(v.shape))
        return quantize(v, *rest)

    monkeypatch.setattr(recipes, "quantize", counted)
    model = nn.Sequential(fn.LayerNormMLP(K, N, recipe="rowwise")).eval()
    x = torch.randn(M, K)
    with torch.no_grad():
        model(x)
        fn.freeze(model)
        first = model(x)
        calls.clear()
        assert torch.equal(model(x), first)
        assert (N, K) not in calls
        assert (K, N) not in calls
        fn.unfreeze(model)
        assert not frozen.is_any()
        model[0].fc1_weight.mul_(2)
        changed = model(x)
    assert not torch.equal(changed, first)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_micro_batches_share_weights_in_8_bits(
    recipe: str, reentrant: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(9)
    shared = fn.LayerNormMLP(K, N, activation="swiglu", normalization="RMSNorm", recipe=recipe)
    alone = copy.deepcopy(shared)
    count: list[torch.Size] = []
    quantize = recipes.quantize
    monkeypatch.setattr(recipes, "quantize", lambda t, *a: count.append(t.shape) or quantize(t, *a))
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (shared, alone)]
    for _ in range(2):
        batches = torch.randn(3, M, K)
        for model, is_frozen in ((alone, False), (shared, True)):
            count.clear()
            with fn.frozen_parameters(model) if is_frozen else nullcontext():
                for x in batches:
                    x = x.requires_grad_()
                    y = (
                        model(x)
                        if reentrant is None
                        else (checkpoint(model, x, use_reentrant=reentrant))
                    )
                    y.square().sum().backward()
            of_weights = [shape for shape in count if M not in shape]
            forwards = 2 if reentrant is not None else 1
            # A forward transposes weights for its backward, also where a checkpoint drops them.
            in_vain = 2 if reentrant is False and recipe != "rowwise_with_gw_hp" else 0
            assert len(of_weights) == (4 if is_frozen else 3 * (2 * forwards + 2 + in_vain))
        # What a context kept is gone with it, whatever an optimizer does to version counters.
        assert not frozen.is_any()
        for one, other in zip(shared.parameters(), alone.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_weights_cast_for_one_call_are_not_kept() -> None:
    layer = fn.LayerNormLinear(K, N, recipe="rowwise")
    with fn.frozen_parameters(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            layer(torch.randn(M, K).requires_grad_()).float().sum().backward()
        record = contexts._here.frozen
        assert record is not None
        assert not record._prepared


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
def test_products_are_counted(recipe: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w, b, dy = leaves(torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        fp8.scaled_linear(x, w, b, recipe=recipe).backward(dy)
    assert counter.get_total_flops() == 3 * 2 * M * K * N
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fn.norm_linear(x, (w, w), activation="swiglu", recipe=recipe)
        fn.norm_linear(x, (w, w, w), recipe=recipe)
    assert counter.get_total_flops() == 5 * 2 * M * K * N


def test_errors_come_before_anything_runs() -> None:
    x, w = torch.randn(M, K), torch.randn(N, K)
    with pytest.raises(ValueError, match="recipe must be one of"):
        fn.norm_linear(x, w, recipe="colwise")
    with pytest.raises(ValueError, match="recipe must be one of"):
        fn.LayerNormLinear(K, N, recipe="colwise")
    with pytest.raises(ValueError, match="recipe must be one of"), fn.autocast_fp8("colwise"):
        pass
    with pytest.raises(RuntimeError, match="multiples of 16"):
        fn.norm_linear(x, w[:100], recipe="rowwise")
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fn.norm_linear(x, w[:, :128], recipe="rowwise")
    with pytest.raises(RuntimeError, match="batch_invariant"), fn.batch_invariant():
        fn.norm_linear(x, w, recipe="rowwise")


@pytest.mark.parametrize("recipe", list(recipes.RECIPES))
@pytest.mark.parametrize("outputs", [(0,), (32, 0), (0, 32)], ids=str)
def test_no_outputs_are_an_error(recipe: str, outputs: tuple[int, ...]) -> None:
    """Zeros took the place of what other layers had given the gradient of x."""
    x = torch.randn(8, 128, dtype=torch.bfloat16).requires_grad_()
    weights = tuple(torch.randn(n, 128, dtype=torch.bfloat16).requires_grad_() for n in outputs)
    with pytest.raises(RuntimeError, match="multiples of 16"):
        fn.norm_linear(x, weights, recipe=recipe)


def test_wrong_operands_are_errors_in_the_words_of_pytorch() -> None:
    x, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    second = torch.randn(K, N).bfloat16()
    wrong: list[Callable[[str | None], Any]] = [
        lambda recipe: fn.norm_linear(x, w, torch.randn(N), recipe=recipe),
        lambda recipe: fn.norm_linear(x, w, torch.randn(N // 2).bfloat16(), recipe=recipe),
        lambda recipe: fn.norm_linear(x, w, residual=torch.randn(M, K), recipe=recipe),
        lambda recipe: fn.norm_linear(x, w, norm_weight=torch.rand(K // 2), recipe=recipe),
        lambda recipe: fn.norm_mlp(
            x, w, None, second[:, : N // 2], activation="gelu", recipe=recipe
        ),
    ]
    for call in wrong:
        for recorded in (False, True):
            with torch.set_grad_enabled(recorded), pytest.raises(RuntimeError):
                call(None)
            with torch.set_grad_enabled(recorded), pytest.raises(RuntimeError):
                call("rowwise")


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_results_may_be_written_in_place(follows: bool, count: int) -> None:
    """As those of Linear layers: by `y += x`, or by the bias that another library adds."""
    x, w, *_ = leaves(torch.float32)
    weights = w if count == 1 else (w, w.detach().clone().requires_grad_())
    with torch.set_grad_enabled(follows):
        for rows in (x.detach(), x.detach().view(4, -1, K)):
            found = fn.norm_linear(rows, weights, recipe="rowwise")
            y = found if count == 1 else found[1]
            # FSDP2 warns of results that are views.
            assert not y._is_view()
            y += 1
            if follows:
                y.sum().backward()


def test_what_broadcasts_is_as_if_written_out() -> None:
    torch.manual_seed(8)
    x, w = torch.randn(2, M, K), torch.randn(N, K)
    bias, residual, after = torch.randn(1), torch.randn(K), torch.randn(M, K)
    found = fn.norm_linear(x, w, bias, residual=residual, recipe="rowwise")
    exact = fn.norm_linear(
        x, w, bias.expand(N), residual=residual.expand(2, M, K), recipe="rowwise"
    )
    assert torch.equal(found, exact)
    mlp = {"activation": "gelu", "recipe": "rowwise"}
    found = fn.norm_mlp(x, w, None, w.t().contiguous(), residual_out=after, **mlp)
    exact = fn.norm_mlp(x, w, None, w.t().contiguous(), residual_out=after.expand(2, M, K), **mlp)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_gpus_without_fp8_say_so(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "hip", None)
    with FakeTensorMode():
        x = torch.empty(16, 16, device="cuda")
        if capability >= (8, 9):
            scaled.require_fp8(x, [x])
            return
        with pytest.raises(RuntimeError, match="NVIDIA A100 multiplies no FP8"):
            scaled.require_fp8(x, [x])


@pytest.mark.parametrize("of_norm", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
def test_norms_before_one_scale_have_one_dtype(
    normalization: str, of_norm: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels quantize, PyTorch normalizes: on GPUs, with parameters of the rows' dtype."""
    seen: list[set[torch.dtype]] = []
    normalized = composition.normalized

    def counted(spec: Any, x: Tensor, t: Any) -> Tensor:
        seen.append({v.dtype for v in (x, t.gamma, t.beta) if v is not None})
        return normalized(spec, x, t)

    monkeypatch.setattr(scaled, "serves", lambda x, *scalings: True)
    monkeypatch.setattr(composition, "normalized", counted)
    x = torch.randn(M, K).bfloat16()
    gamma, beta = torch.rand(K).to(of_norm), torch.randn(K).to(of_norm)
    if normalization == "rms_norm":
        beta = None
    _, q, scale = scaled.norm(x, None, gamma, beta, normalization, 1e-6, 0.0, "tensor", False)
    assert seen == [{of_norm}]
    z = (
        F.layer_norm(x.float(), (K,), gamma.float(), beta.float(), 1e-6)
        if beta is not None
        else (F.rms_norm(x.float(), (K,), gamma.float(), 1e-6))
    )
    expected = recipes.dequantize(
        *recipes.quantize(z, Cast(E4M3, "tensor"), False), "tensor", torch.float32
    )
    found = recipes.dequantize(q, scale, "tensor", torch.float32)
    assert (found - expected).norm() < 0.02 * expected.norm()
