"""MLPs in FP8 whose hidden rows get one scale, rows that try its bound, and operands of its op."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fp8_products import LEAST, decibels
from torch import Tensor
from torch.nn import functional

import fused_norm as fn
from fused_norm import recipes
from fused_norm.activations import GATES, PLAIN, activated, is_gate
from fused_norm.ops import hidden_scale, scaled_hidden
from fused_norm.recipes import E4M3, Cast

BF16 = torch.bfloat16
NORMS = ("RMSNorm", "LayerNorm")
K, N, M = 256, 384, 140
# Whether a gate is of two weights, or of the halves of one.
CASES = [(name, False) for name in (*PLAIN, *GATES.values())]
CASES += [(name, True) for name in GATES.values()]
EXACT = [case for case in CASES if case[0] in ("relu", "reglu")]


def matrix(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape).to(BF16)


def layer(
    normalization: str = "RMSNorm",
    activation: str = "gelu",
    change: Callable[[fn.LayerNormMLP], None] | None = None,
    recipe: str = "rowwise",
    size: tuple[int, int] = (K, N),
    **options: Any,
) -> fn.LayerNormMLP:
    torch.manual_seed(3)
    how: dict[str, Any] = {"activation": activation, "recipe": recipe, "dtype": BF16, **options}
    mlp = fn.LayerNormMLP(*size, normalization=normalization, **how).eval().requires_grad_(False)
    with torch.no_grad():
        mlp.layer_norm_weight.uniform_(0.5, 1.5)
        if mlp.layer_norm_bias is not None:
            mlp.layer_norm_bias.normal_()
        if change is not None:
            change(mlp)
    return mlp


def outliers_of_gamma(mlp: fn.LayerNormMLP) -> None:
    mlp.layer_norm_weight[::50] *= 1000


def huge_bias(mlp: fn.LayerNormMLP) -> None:
    assert mlp.fc1_bias is not None
    mlp.fc1_bias.normal_(std=100)


def huge_beta(mlp: fn.LayerNormMLP) -> None:
    if mlp.layer_norm_bias is not None:
        mlp.layer_norm_bias *= 100


def heavy_tails(mlp: fn.LayerNormMLP) -> None:
    """A weight of Student's t with three degrees of freedom, and rows of different sizes."""
    torch.manual_seed(4)
    t = torch.distributions.StudentT(3.0).sample(mlp.fc1_weight.shape)
    sizes = torch.randn(len(t), 1).mul(0.5).exp()
    mlp.fc1_weight.copy_(t * sizes / t.shape[1] ** 0.5)


def large_bias(mlp: fn.LayerNormMLP) -> None:
    assert mlp.fc1_bias is not None
    mlp.fc1_bias.normal_(std=4)


def large_beta(mlp: fn.LayerNormMLP) -> None:
    if mlp.layer_norm_bias is not None:
        mlp.layer_norm_bias *= 8


CHANGES = [None, outliers_of_gamma, huge_bias, huge_beta, heavy_tails]
# The bound of a gate leaves less room.
CHANGES_OF_GATES = [None, outliers_of_gamma, large_bias, large_beta, heavy_tails]
BOUNDED: list[tuple[str, Any]] = [*itertools.product(("relu", "gelu"), CHANGES)]
BOUNDED += itertools.product(("reglu", "swiglu"), CHANGES_OF_GATES)


@contextmanager
def scales(fewest: int = hidden_scale.FEWEST_ROWS) -> Iterator[list[float]]:
    """Yield the scales of hidden rows: 0.0 if each row has its own.

    Args:
        fewest: Fewest rows that get one.
    """
    found: list[float] = []

    def noting(*given: Any) -> float:
        found.append(hidden_scale.hidden_scale(*given))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_scale, "FEWEST_ROWS", fewest)
        patch.setattr(scaled_hidden, "hidden_scale", noting)
        yield found


def by_rows(mlp: fn.LayerNormMLP, x: Tensor, **more: Tensor) -> Tensor:
    """Return a result whose hidden rows find a scale each."""
    with scales(fewest=1 << 40):
        return mlp(x, **more)


def adversarial(mlp: fn.LayerNormMLP, rows: int = N) -> Tensor:
    """Return rows whose norm is along some row of the first weight each, times gamma, both ways.

    Before a gate, they are halfway between a row of the gate's and one of what it gates, or minus
    that one.
    """
    w = mlp.fc1_weight.float() * mlp.layer_norm_weight.float()
    w /= w.norm(dim=1, keepdim=True)
    at = torch.arange(rows) % N
    sign = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).to(w.device)[:, None]
    x = w[:N][at] + w[N:][at] * sign if is_gate(mlp.activation) else w[at] * sign
    return (x / x.norm(dim=1, keepdim=True).clamp(min=1e-6) * 16).to(BF16)


def tailed(rows: int = M, features: int = K) -> Tensor:
    """Return rows of different sizes with a few features that are far larger than the others."""
    torch.manual_seed(5)
    x = torch.randn(rows, features) * torch.randn(rows, 1).exp()
    x[:, ::61] *= 50
    return x.to(BF16)


def hidden_of(mlp: fn.LayerNormMLP, x: Tensor) -> Tensor:
    """Return hidden rows as they are in 8 bits, widened."""
    found: list[Tensor] = []
    original = scaled_hidden.hidden_op

    def noting(*given: Any) -> list[Tensor]:
        q, scale = original(*given)
        found.append(recipes.dequantize(q, scale, "row", torch.float64))
        return [q, scale]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_hidden, "hidden_op", noting)
        mlp(x)
    return found[0]


def with_own_powers_of_two(mlp: fn.LayerNormMLP, x: Tensor) -> Tensor:
    """Return hidden rows as they are in 8 bits where each has a power of two as its own scale."""
    found: list[Tensor] = []
    original = scaled_hidden.hidden_op

    def noting(*given: Any) -> list[Tensor]:
        a = torch.ops.fused_norm.fp8_linear(*given[:8], None, *given[8:14])
        q, scale = recipes.quantize(a, Cast(E4M3, "row"), True)
        found.append(recipes.dequantize(q, scale, "row", torch.float64))
        result: list[Tensor] = original(*given)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_hidden, "hidden_op", noting)
        mlp(x)
    return found[0]


def exact_hidden(mlp: fn.LayerNormMLP, x: Tensor) -> Tensor:
    K, gamma, beta, eps = (x.shape[-1],), mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.eps
    if beta is None:
        z = functional.rms_norm(x.double(), K, gamma.double(), eps)
    else:
        z = functional.layer_norm(x.double(), K, gamma.double(), beta.double(), eps)
    bias = None if mlp.fc1_bias is None else mlp.fc1_bias.double()
    h = functional.linear(z, mlp.fc1_weight.double(), bias)
    return activated(mlp.activation, h)


def frozen(*given: Any, **options: Any) -> fn.LayerNormMLP:
    return fn.freeze(layer(*given, **options))


def assert_clean_but_for(found: Tensor, clean: Tensor, rows: list[int]) -> None:
    bad = torch.zeros(len(found), dtype=torch.bool, device=found.device)
    bad[rows] = True
    assert not found[bad].isfinite().any()
    assert torch.equal(found[~bad], clean[~bad])


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a.cpu().float(), b.cpu().float())
        for a, b in zip(found, expected, strict=True)
    )


def operands(
    M: int,
    K: int,
    N: int,
    activation: str,
    has_bias: bool,
    scaling: str = "row",
    seed: int = 0,
    is_pair: bool = False,
) -> list[Any]:
    """Return what the op is called with; no product of these numbers is rounded."""
    torch.manual_seed(seed)
    outputs = 2 * N if is_gate(activation) and not is_pair else N
    sizes = [M, outputs, N][: 2 + is_pair]
    numbers = [torch.randint(-2, 3, (n, K)).float().to(E4M3) for n in sizes]
    own = [torch.randint(-1, 3, (n, 1)).float().exp2() for n in sizes]
    own = [s if scaling == "row" else s[:1] for s in own]
    biases = [(torch.arange(n) % 7 - 3.0).to(BF16) if has_bias else None for n in sizes[1:]]
    rows, *layers = zip(numbers, own, strict=True)
    ys = [recipes.product(rows, scaling, layer, scaling).abs() + 4 for layer in layers]
    if is_gate(activation):
        gate, up = ys if is_pair else ys[0].chunk(2, 1)
        ys = [gate * up]
    one_scale = float(recipes.scale_of(ys[0].amax() * 1.01, E4M3, power_of_two=True))
    given = [*rows, *layers[0], scaling, scaling, False, biases[0], activation, BF16]
    given += [*layers[1], biases[1]] if is_pair else [None] * 3
    return [*given, False, None, None, True, 0.0, one_scale]


def exact(given: list[Any]) -> Tensor:
    """Return what the op is to round, in float64, of operands that have biases."""
    by, layers = given[4:6], [[*given[2:4], given[7]], given[10:13]]
    ys = [
        recipes.product((given[0], given[1]), by[0], (w, own), by[1], torch.float64) + b.double()
        for w, own, b in layers
        if w is not None
    ]
    return activated(given[8], torch.cat(ys, 1))


def assert_one_scale_by_the_backend(model: torch.nn.Module, x: Tensor) -> None:
    """Check a model whose graph's parameters the backend freezes, against itself unfrozen."""
    torch.compiler.reset()
    compiled: Any = torch.compile(
        model, backend="fused_norm", options={"fp8": "rowwise", "freeze": True}
    )
    with scales() as used:
        found = [compiled(x) for _ in range(2)]
    assert used
    assert all(used)
    assert torch.equal(*found)
    fn.unfreeze(model)
    assert decibels(found[0], model(x)) > LEAST
