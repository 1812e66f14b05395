"""Weights that FSDP2 gathers in 8 bits: the bits of weights that calls quantize; one process.

Their memory is freed after the forward, and written again before the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_norm as fn
from fused_norm import recipes
from fused_norm.ops import normed_linears, quantized
from fused_norm.ops.fp8 import scaled_linear
from fused_norm.recipes import E4M3, Cast

training_tensor: Any = pytest.importorskip("torchao.float8.float8_training_tensor")

K, N, M = 32, 48, 70


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape).to(dtype)


def gathered(weight: Tensor, **changes: Any) -> Any:
    """Return a weight as FSDP2 gathers it, as a leaf of its own."""
    factor = (448 / weight.detach().abs().max().double()).float()
    q = (weight.detach().float() * factor).to(E4M3)
    options = {"orig_dtype": weight.dtype, "linear_mm_config": None} | changes
    role = training_tensor.GemmInputRole.WEIGHT
    made = training_tensor.Float8TrainingTensor(q, factor, gemm_input_role=role, **options)
    return nn.Parameter(made, requires_grad=weight.requires_grad)


@contextmanager
def freed(weights: Sequence[Any]) -> Iterator[None]:
    """Free the memory of weights, then have the values back with scales in memory of their own."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(w._data for w in weights)):
        held = [w._data.clone() for w in weights]
        for weight in weights:
            weight._data.untyped_storage().resize_(0)
        yield
        for weight, values in zip(weights, held, strict=True):
            weight._data.untyped_storage().resize_(values.untyped_storage().nbytes())
            weight._data.copy_(values)
            weight._scale = weight._scale.clone()


Call = Callable[[Tensor, list[Any]], Any]


def one(x: Tensor, weights: list[Any]) -> Any:
    return scaled_linear(x, weights[0], matrix(N, seed=8), recipe="tensorwise")


def several(x: Tensor, weights: list[Any]) -> Any:
    return fn.norm_linear(x, weights[:2], normalization="rms_norm", recipe="tensorwise")


def activated(x: Tensor, weights: list[Any]) -> Any:
    return fn.norm_linear(x, weights[0], activation="gelu", recipe="tensorwise")


def mlp(x: Tensor, weights: list[Any]) -> Any:
    gate = tuple(weights[:2])
    how: Any = {"normalization": "rms_norm", "activation": "swiglu", "recipe": "tensorwise"}
    return fn.norm_mlp(x, gate, None, weights[2], residual_out=x, **how)


CALLS = {"one": (one, 1), "several": (several, 2), "activated": (activated, 1), "mlp": (mlp, 3)}


def parameters(count: int) -> list[Tensor]:
    shapes = [(N, K), (N, K), (K, N)][:count]
    return [matrix(*shape, seed=i + 1).requires_grad_() for i, shape in enumerate(shapes)]


def gradients(call: Call, weights: list[Any], gathers: Sequence[Any] = ()) -> list[Tensor]:
    x = matrix(M, K).requires_grad_()
    y = call(x, weights)
    ys = [y] if isinstance(y, Tensor) else [*y]
    loss = sum((v * matrix(*v.shape, seed=9)).sum() for v in ys)
    with freed(gathers):
        pass
    loss.backward()
    return [*(v.detach() for v in ys), x.grad, *(w.grad for w in weights)]


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mixed", [False, True])
def test_bits(name: str, is_normed: bool, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hopper's functions, whose ops run PyTorch's on a CPU.
    monkeypatch.setattr(normed_linears, "serves", lambda *_: is_normed)
    call, count = CALLS[name]
    plain, others = parameters(count), parameters(count)
    others[0] = gathered(plain[0])
    if not mixed:
        others = [gathered(weight) for weight in plain]
    of_fsdp = [w for w in others if quantized.is_gathered(w)]
    expected = gradients(call, plain)
    found = gradients(call, others, of_fsdp)
    for mine, other in zip(found, expected, strict=True):
        assert type(mine) is Tensor
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    # Frozen weights are kept in 8 bits; these are their own.
    with fn.frozen_parameters():
        for _ in range(2):
            for weight in others:
                weight.grad = None
            again = gradients(call, others, of_fsdp)
            assert all(map(torch.equal, again, found))
    with torch.no_grad():
        x = matrix(M, K)
        ys, wanted = (call(x, each) for each in (others, plain))
    pairs = [(ys, wanted)] if isinstance(ys, Tensor) else zip(ys, wanted, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", CALLS)
def test_new_values_are_read(name: str) -> None:
    """Nothing is kept from a step to the next, whose weights are in the same memory."""
    call, count = CALLS[name]
    plain = parameters(count)
    weights = [gathered(weight) for weight in plain]
    gradients(call, weights)
    for weight, own in zip(weights, plain, strict=True):
        weight.grad = None
        with torch.no_grad():
            own.mul_(3).add_(0.25)
            new = gathered(own)
            weight._data.copy_(new._data)
            weight._scale = new._scale
    assert all(map(torch.equal, gradients(call, weights), gradients(call, plain)))


@pytest.mark.parametrize("is_normed", [False, True])
def test_no_copy_is_kept(is_normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normed_linears, "serves", lambda *_: is_normed)
    weights = [gathered(weight) for weight in parameters(3)]
    saved: list[Any] = []

    def keep(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mlp(matrix(M, K).requires_grad_(), weights)
    kept = [each for each in saved if quantized.is_gathered(each)]
    assert {id(each) for each in kept} == {id(weight) for weight in weights}
    sizes = {tuple(each.shape) for each in saved if each.dtype is E4M3}
    assert sizes
    assert not sizes & {(K, N), (N, K)}


def test_weights_without_a_gradient() -> None:
    plain = [weight.detach() for weight in parameters(3)]
    weights = [gathered(weight) for weight in plain]
    found, expected = (gradients(mlp, each) for each in (weights, plain))
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert found[2:] == [None] * 3


def test_rows_without_a_gradient() -> None:
    plain = parameters(1)
    weights = [gathered(plain[0])]
    for each in (weights, plain):
        one(matrix(M, K), each).sum().backward()
    assert torch.equal(weights[0].grad, plain[0].grad)


def test_autocast() -> None:
    plain = [matrix(N, K, dtype=torch.float32).requires_grad_()]
    weights = [gathered(plain[0])]
    x = matrix(M, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = fn.norm_linear(x, weights[0], recipe="tensorwise")
    assert y.dtype is torch.bfloat16
    y.float().square().sum().backward()
    z = nn.functional.layer_norm(x, (K,)).bfloat16()
    q, scale = quantized.parts(weights[0])
    rows = recipes.quantize(z, Cast(E4M3, "tensor"), False)
    exact = recipes.product(rows, "tensor", (q, scale), "tensor")
    torch.testing.assert_close(y.float(), exact.detach(), rtol=2e-2, atol=2e-2)
    assert weights[0].grad.dtype is torch.float32


def test_errors() -> None:
    x, weight = matrix(M, K), gathered(parameters(1)[0])
    with pytest.raises(ValueError, match="weight is quantized for recipe='tensorwise', but got"):
        fn.norm_linear(x, weight, recipe="rowwise")
    q = weight._data.detach()
    rows = training_tensor.Float8TrainingTensor(q, torch.ones(N, 1), torch.bfloat16, None)
    with pytest.raises(NotImplementedError, match=f"with {N} scales"):
        fn.norm_linear(x, rows, recipe="tensorwise")
    turned = training_tensor.Float8TrainingTensor(q.t(), torch.ones(()), torch.bfloat16, None)
    with pytest.raises(NotImplementedError, match="no matrix of dense rows"):
        fn.norm_linear(matrix(M, N), turned, recipe="tensorwise")
