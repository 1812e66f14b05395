"""What transformers has in FP8, in a compiled model: its numbers, and what is left to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import ON_HOPPER
from float8_models import (
    WIDE,
    Block,
    K,
    OneLayer,
    compiled,
    decibels,
    fused_graph,
    report,
    rows,
)
from torch import Tensor, nn

from fused_norm import recipes
from fused_norm.ops import fp8_inference, quantized, scaled_hidden
from fused_norm.recipes import BLOCK, E4M3

finegrained: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
compressed: Any = pytest.importorskip("transformers.integrations.compressed_tensors")

# transformers asks for PyTorch's version within its layers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.usefixtures("narrow_fp8"),
]

Convert = Callable[[nn.Linear], nn.Module]
# What Triton's kernels of the Hub are named, behind a digest of their sources.
NAMESPACE = "_finegrained_fp8_of_cpu"


def of_rows(linear: nn.Linear) -> nn.Module:
    """Return a layer as transformers makes it of a compressed-tensors checkpoint."""
    has_bias = linear.bias is not None
    layer = compressed.CompressedTensorsFP8Linear(linear.in_features, linear.out_features, has_bias)
    q, scale = compressed.quantize_fp8_per_row(linear.weight.detach())
    state = {"weight": q, "weight_scale": scale[None]}
    return loaded(layer, linear, state)


def of_blocks(
    linear: nn.Linear, block_size: tuple[int, int] | None = (BLOCK, BLOCK), **config: Any
) -> nn.Module:
    """Return a layer as transformers makes it of a FineGrainedFP8 checkpoint."""
    layer = finegrained.FP8Linear(
        linear.in_features,
        linear.out_features,
        block_size,
        has_bias=linear.bias is not None,
        **config,
    )

    class Quantizer:
        class quantization_config:
            weight_block_size = block_size
            scale_fmt = config.get("scale_fmt", "float")

    state = finegrained.Fp8Quantize(Quantizer).convert({"weight": linear.weight.detach()})
    scale = state["weight_scale_inv"].reshape(layer.weight_scale_inv.shape)
    return loaded(layer, linear, {"weight": state["weight"], "weight_scale_inv": scale})


def loaded(layer: nn.Module, linear: nn.Linear, state: dict[str, Tensor]) -> nn.Module:
    if linear.bias is not None:
        layer.bias = nn.Parameter(torch.empty_like(linear.bias))
        state["bias"] = linear.bias.detach()
    layer.load_state_dict(state, strict=False)
    return layer.requires_grad_(False)


def converted(model: nn.Module, convert: Convert) -> nn.Module:
    """Return a copy of a model with its Linear layers converted."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, convert(layer))
    return model


def of_kernel(
    A: Tensor, B: Tensor, Bs: Tensor, block_size: list[int], output_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute what the Triton kernel does, which no CPU runs, in its order of roundings."""
    K, N = A.shape[-1], B.shape[0]
    tiles = F.pad(A.float().reshape(-1, K), (0, -K % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = tiles.abs().amax(-1, keepdim=True) / 448
    q = (tiles / scales.clamp_min(1e-12)).to(E4M3).float()
    weight = F.pad(B.float(), (0, -K % BLOCK)).unflatten(-1, (-1, BLOCK))
    total = torch.zeros(q.shape[0], N, device=A.device)
    for k in range(q.shape[1]):
        factors = scales[:, k] * Bs.float()[:, k].repeat_interleave(BLOCK)[:N]
        total += q[:, k] @ weight[:, k].t() * factors
    return total.to(output_dtype or A.dtype).reshape(*A.shape[:-1], N)


@pytest.fixture(scope="module")
def registered() -> Iterator[Any]:
    """Give the kernel's op, by its name and schema."""
    with torch.library._scoped_library(NAMESPACE, "DEF") as library:
        name = "w8a8_block_dynamic_fp8_matmul"
        library.define(
            f"{name}(Tensor A, Tensor B, Tensor Bs, int[] block_size, "
            "ScalarType? output_dtype=None) -> Tensor"
        )
        for kind in ("CPU", "CUDA"):
            library.impl(name, of_kernel, kind)
        library.impl(
            name,
            lambda A, B, Bs, block_size, output_dtype=None: A.new_empty(
                (*A.shape[:-1], B.shape[0]), dtype=output_dtype or A.dtype
            ),
            "Meta",
        )
        yield getattr(getattr(torch.ops, NAMESPACE), name)


@pytest.fixture
def kernel(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers call that op, as its `matmul_2d` on GPUs does for such blocks."""

    def matmul(
        A: Tensor, B: Tensor, Bs: Tensor, block_size: Any, dtype: torch.dtype, activation_scale: Any
    ) -> Tensor:
        assert activation_scale is None
        result: Tensor = registered(A, B, Bs, block_size, dtype)
        return result

    of_hub = finegrained.FineGrainedFP8(matmul, None, None)
    monkeypatch.setattr(finegrained, "_FINEGRAINED_FP8", of_hub)


CONVERTS: dict[str, Convert] = {"rowwise": of_rows, "blockwise": of_blocks}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("recipe", list(CONVERTS))
@pytest.mark.parametrize("then", ["eager", "inductor"])
def test_layers_are_recognized_and_their_numbers_taken(recipe: str, then: str) -> None:
    torch.manual_seed(0)
    plain = Block().bfloat16()
    model, x = converted(plain, CONVERTS[recipe]), rows()
    with torch.no_grad():
        name = f"FP8 {recipe}"
        found = report(model, x)
        assert {found["norm1"], found["norm2"], found["out"]} == {name}
        exact = plain.double()(x.double())
        theirs, ours = model(x), compiled(model, then=then)(x)
    assert ours.dtype is theirs.dtype
    assert decibels(ours, exact) > max(30.0, decibels(theirs, exact) - 0.3)
    # A norm is rounded once less on its way; other numbers of a weight would leave 28 dB.
    assert decibels(ours, theirs) > 34


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("recipe", list(CONVERTS))
def test_with_the_roundings_of_the_model_results_are_theirs(recipe: str) -> None:
    torch.manual_seed(0)
    model, x = converted(Block().bfloat16(), CONVERTS[recipe]), rows()
    with torch.no_grad():
        found = compiled(model, rounding="model", then="aot_eager")(x)
        theirs = model(x)
    if recipe == "rowwise":
        assert torch.equal(found, theirs)
    # Sums of blocks are rounded in another order.
    assert decibels(found, theirs) > 50


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("recipe", list(CONVERTS))
def test_numbers_and_scales_are_their_own(recipe: str) -> None:
    torch.manual_seed(0)
    model, x = (
        converted(OneLayer(N=K + 144).bfloat16(), CONVERTS[recipe])
        if (recipe == "rowwise")
        else converted(OneLayer(N=K + 128).bfloat16(), CONVERTS[recipe]),
        rows(),
    )
    layer: Any = model.linear
    # Numbers below the largest: quantized again, they would be others.
    layer.weight.data = (layer.weight.float() / 3).to(E4M3)
    scale = layer.weight_scale if recipe == "rowwise" else layer.weight_scale_inv
    scale.data *= 3
    with torch.no_grad():
        y = compiled(model)(x)
        z = F.layer_norm(x.float(), (K,), model.norm.weight.float(), model.norm.bias.float())
        how = recipes.find(recipe)
        q, of_rows_ = recipes.quantize(z.reshape(-1, K), how.input, False)
        wide = scale.reshape(-1, 1) if recipe == "rowwise" else scale
        exact = recipes.product(
            (q, of_rows_),
            how.input.scaling,
            (layer.weight, wide),
            how.weight.scaling,
            torch.float64,
        )
    assert decibels(y.reshape(exact.shape), exact + layer.bias.double()) > 45


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("recipe", list(CONVERTS))
def test_nothing_of_transformers_is_left_in_the_graph(recipe: str) -> None:
    with torch.no_grad():
        graph = fused_graph(converted(Block().bfloat16(), CONVERTS[recipe]), rows())
    names = {str(node.target) for node in graph.nodes}
    assert not [name for name in names if "scaled_mm" in name or "matmul" in name]
    dtypes = [getattr(node.meta.get("example_value"), "dtype", None) for node in graph.nodes]
    # Of the layers' own parameters alone.
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    assert dtypes.count(E4M3) == sum(n.meta["example_value"].dtype is E4M3 for n in inputs) == 4


class GatedMLP(nn.Module):
    """The MLP of a LLaMA, and the norm before it."""

    def __init__(self, features: int = K, hidden: int = 2 * K) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(features)
        sizes = {"gate": (features, hidden), "up": (features, hidden), "down": (hidden, features)}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(*size, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(z)) * self.up(z))
        return y


@pytest.mark.usefixtures("kernel")
def test_the_hidden_rows_of_an_mlp_stay_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = GatedMLP().bfloat16()
    model, x, calls = converted(plain, of_blocks), rows(), []

    def hidden(*arguments: Any, **options: Any) -> list[Tensor]:
        # Tracing calls it, too.
        calls.append(type(arguments[0]) is Tensor)
        return scaled_hidden.hidden(*arguments, **options)

    monkeypatch.setattr(fp8_inference, "hidden_rows", hidden)
    with torch.no_grad():
        exact, theirs, ours = plain.double()(x.double()), model(x), compiled(model, then="eager")(x)
    assert sum(calls) == 1
    assert decibels(ours, exact) > max(30.0, decibels(theirs, exact) - 0.3)
    assert decibels(ours, theirs) > 34


@pytest.mark.usefixtures("kernel")
def test_what_no_recipe_of_ours_is_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows()
    plain = OneLayer().bfloat16()
    cases: list[tuple[str, nn.Module]] = [
        (f"a size of {K // 2}, below {K}", converted(OneLayer(N=K // 2).bfloat16(), of_rows)),
        (f"a size of {K // 2}, below {K}", converted(OneLayer(N=K // 2).bfloat16(), of_blocks)),
        (
            "scales of torch.float8_e8m0fnu",
            converted(plain, lambda linear: of_blocks(linear, scale_fmt="ue8m0")),
        ),
        ("blocks of [64, 128]", converted(plain, lambda linear: of_blocks(linear, (64, 128)))),
    ]
    with torch.no_grad():
        for words, model in cases[:3]:
            found = report(model, x)
            assert words in found["linear"], found
            assert found["linear"].startswith("left to transformers: ")
            assert torch.equal(compiled(model)(x), model(x))

        def otherwise(v: Tensor) -> tuple[Tensor, Tensor]:
            scales = v.float().abs().amax(-1).clamp_min(1e-3) / 448
            return (v.float() / scales[:, None]).to(E4M3), scales

        model = converted(plain, of_rows)
        monkeypatch.setattr(compressed, "quantize_fp8_per_row", otherwise)
        assert "quantized in another way" in report(model, x)["linear"]
        assert torch.equal(compiled(model)(x), model(x))


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("then", ["eager", "inductor"])
def test_blocks_are_recognized_on_gpus(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Hopper's kernels, with their numbers."""
    monkeypatch.setenv("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")
    torch.manual_seed(0)
    plain = Block(WIDE).bfloat16()
    model, x = converted(plain, of_blocks).cuda(), rows(features=WIDE).cuda()
    with torch.no_grad():
        exact, theirs = plain.double()(rows(features=WIDE).double()), model(x)
        found = report(model, x)
        assert {found["norm1"], found["norm2"], found["out"]} == {"FP8 blockwise"}
        ours = compiled(model, then=then)(x)
    assert decibels(ours.cpu(), exact) > max(30.0, decibels(theirs.cpu(), exact) - 0.3)
    assert decibels(ours, theirs) > 34


def test_a_weight_of_two_parameters_has_no_ops() -> None:
    weight = quantized.scaled_weight(
        torch.zeros(16, 32, dtype=E4M3), torch.ones(1, 16), "rowwise", torch.bfloat16
    )
    assert (weight.shape, weight.dtype) == ((16, 32), torch.bfloat16)
    assert quantized.parts(weight)[1].shape == (16, 1)
    with pytest.raises(NotImplementedError, match="has no form for a weight in FP8"):
        weight + 1
