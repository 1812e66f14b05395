"""The head on CPUs against float64: all options together, odd sizes, logits of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import case, check, composed, ours, results
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fused_norm as fn
from fused_norm.chain import head
from fused_norm.ops import head as head_ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def options(draw: st.DrawFn, rows: int, classes: int) -> dict[str, Any]:
    """Return some options; those left out are as a user leaves them."""
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    found: dict[str, Any] = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "chunk_rows": draw(st.sampled_from([None, "small", 1, 5, 64])),
    }
    if draw(st.booleans()):
        found["class_weight"] = torch.rand(classes, generator=numbers)
    if draw(st.booleans()):
        found["token_weight"] = torch.rand(rows, generator=numbers)
    return found


@given(
    data=st.data(),
    bias=st.booleans(),
    upstream=st.sampled_from([1.0, -0.25]),
    of_logsumexp=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_options_in_float64(data: Any, bias: bool, upstream: float, of_logsumexp: float) -> None:
    given_options = data.draw(options(13, 11))
    tensors = case(13, 8, 11, bias=bias, dtype=torch.float64)
    of_composed = {name: v for name, v in given_options.items() if name != "chunk_rows"}
    exact = results(composed, tensors, upstream, of_logsumexp, **of_composed)
    found = results(ours, tensors, upstream, of_logsumexp, **given_options)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@given(data=st.data(), bias=st.booleans(), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_options_in_each_dtype(data: Any, bias: bool, dtype: torch.dtype) -> None:
    given_options = data.draw(options(67, 301))
    given_options["chunk_rows"] = 40
    check(case(67, 32, 301, bias=bias, dtype=dtype), at_most=3, **given_options)


@pytest.mark.parametrize("classes", [301, 9001])
def test_weights_are_not_rounded_in_the_gradient_of_the_bias(classes: int) -> None:
    for seed in range(40, 60):
        numbers = torch.Generator().manual_seed(seed)
        given_options = {"class_weight": torch.rand(classes, generator=numbers)}
        if seed % 2:
            given_options["token_weight"] = torch.rand(67, generator=numbers)
        torch.manual_seed(seed)
        tensors = case(67, 32, classes, bias=True, dtype=torch.bfloat16)
        check(tensors, at_most=3, reduction="sum", chunk_rows=40, **given_options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 7, 32001, 50257, 128256])
def test_vocabularies(classes: int, dtype: torch.dtype) -> None:
    check(case(40, 8, classes, dtype=dtype), at_most=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("std", [0.1, 1.0, 4.0, 12.0, 50.0])
def test_deviations(std: float, dtype: torch.dtype) -> None:
    check(case(200, 64, 1000, std, dtype=dtype), at_most=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_and_one_huge_one(dtype: torch.dtype) -> None:
    x, weight, target, _ = case(50, 16, 301, dtype=dtype)
    check((x, weight[:1].expand_as(weight).contiguous(), target, None), at_most=3)
    weight[17] *= 200
    check((x, weight, target, None), at_most=3)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 5, shape)
    loss, lse = fn.linear_cross_entropy(x, weight, target, return_logsumexp=True, reduction="none")
    assert loss.shape == lse.shape == shape
    exact = F.cross_entropy(F.linear(x, weight).reshape(-1, 5), target.reshape(-1), reduction="sum")
    for a, b in zip(
        torch.autograd.grad(loss.sum(), (x, weight)),
        torch.autograd.grad(exact, (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(normalization: str, offset: float) -> None:
    torch.manual_seed(0)
    double: Any = {"dtype": torch.float64, "requires_grad": True}
    x, residual = (torch.randn(2, 9, 8, **double) for _ in range(2))
    gamma, beta = (torch.randn(8, **double) for _ in range(2))
    weight, target = torch.randn(13, 8, **double), torch.randint(0, 13, (2, 9))
    loss = fn.norm_linear_cross_entropy(
        *(x, weight, target),
        normalization=normalization,
        norm_weight=gamma,
        norm_bias=beta,
        eps=1e-3,
        weight_offset=offset,
        residual=residual,
        chunk_rows=4,
    )
    rows = x + residual
    if normalization == "rms_norm":
        z = F.rms_norm(rows, (8,), gamma + offset, 1e-3) + beta
    else:
        z = F.layer_norm(rows, (8,), gamma + offset, beta, 1e-3)
    exact = F.cross_entropy(F.linear(z, weight).view(-1, 13), target.view(-1))
    torch.testing.assert_close(loss, exact)
    leaves = (x, residual, gamma, beta, weight)
    for a, b in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(exact, leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"softcap": 3.0}], ids=str)
def test_loss_alone(options: dict[str, Any], masked: bool) -> None:
    """Without gradients, with classes whose logits are -inf, labels among them."""
    x, weight, target, bias = case(50, 8, 31, bias=True, dtype=torch.float64)
    if masked and "softcap" not in options:
        bias[:5], target[3] = -torch.inf, 2
    given = {"reduction": "none", "chunk_rows": 16, **options}
    with torch.no_grad():
        found = ours(x, weight, target, bias, **given)
    exact = composed(x, weight, target, bias, reduction="none", **options)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def test_all_ignored() -> None:
    x, weight, target, _ = case(8, 4, 5)
    tensors = (x, weight, torch.full_like(target, -100), None)
    for reduction in ("mean", "sum"):
        found = results(ours, tensors, reduction=reduction)
        assert torch.isnan(found[0]) if reduction == "mean" else found[0] == 0
        assert all(not gradient.any() for gradient in found[2:])


def test_bits_repeat() -> None:
    tensors = case(500, 32, 1001, dtype=torch.bfloat16)
    first = results(ours, tensors, chunk_rows=64)
    for _ in range(3):
        assert all(map(torch.equal, first, results(ours, tensors, chunk_rows=64)))


@pytest.mark.parametrize("M", [1, 63, 64, 1000, 8192, 100000])
@pytest.mark.parametrize("chunk_rows", [0, 100])
def test_chunks_are_alike_and_small(M: int, chunk_rows: int) -> None:
    size = head.rows_of_chunk(M, 32000, chunk_rows, True)
    chunks = -(-M // size)
    assert size <= (chunk_rows or head.CPU_ROWS)
    assert M - (chunks - 1) * size > size // 2 or chunks == 1 or 2 * chunks > M
    if not chunk_rows and M >= 1024:
        assert chunks >= 8


@pytest.mark.parametrize(
    ("M", "V", "size"), [(512, 16000, 256), (256, 32000, 256), (512, 64000, 128)]
)
def test_chunks_of_few_logits_pack_the_weight_half_as_often(M: int, V: int, size: int) -> None:
    assert head.rows_of_chunk(M, V, 0, True) == size


def test_frozen_weight_and_rows() -> None:
    x, weight, target, _ = case(20, 8, 11)
    for leaf in range(2):
        leaves = [x.detach().clone(), weight.detach().clone()]
        leaves[leaf].requires_grad_()
        fn.linear_cross_entropy(*leaves, target).backward()
        assert leaves[1 - leaf].grad is None
        found = leaves[leaf].grad
        exact = results(composed, (x, weight, target, None))[2 + leaf]
        torch.testing.assert_close(found, exact)


def test_tied_embedding() -> None:
    weight = torch.randn(11, 8, requires_grad=True)
    target = torch.randint(0, 11, (20,))

    def gradient(loss: Any) -> Tensor:
        (found,) = torch.autograd.grad(loss(F.embedding(target, weight), weight, target), weight)
        return found

    exact = gradient(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))
    torch.testing.assert_close(gradient(fn.linear_cross_entropy), exact)


def test_module_is_called_as_liger_s() -> None:
    x, weight, target, bias = case(20, 8, 11, bias=True)
    own = torch.rand(11)
    module = fn.LinearCrossEntropy(own, -100, 1e-3, 0.1, "mean", 30.0)
    kept: Any = {"class_weight": own, "z_loss": 1e-3, "label_smoothing": 0.1, "softcap": 30.0}
    exact = composed(x, weight, target, bias, **kept)[0]
    torch.testing.assert_close(module(weight, x, target, bias), exact)


def test_main_grad() -> None:
    x, weight, target, _ = case(20, 8, 11)
    parameter: Any = torch.nn.Parameter(weight)
    parameter.main_grad = torch.ones(11, 8)
    fn.LinearCrossEntropy(fuse_wgrad_accumulation=True)(parameter, x, target).backward()
    exact = results(composed, (x, weight, target, None))[3]
    torch.testing.assert_close(parameter.main_grad, 1 + exact)
    assert parameter.grad is None


def test_autocast() -> None:
    x, weight, target, _ = case(64, 32, 101)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(ours, (x, weight, target, None))
        exact = results(composed, (x, weight, target, None))
    assert found[0].dtype is torch.float32
    assert [g.dtype for g in found[2:]] == [torch.float32] * 2
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-3)


@given(
    data=st.data(),
    bias=st.booleans(),
    upstream=st.sampled_from([1.0, -0.25]),
    of_logsumexp=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=100, deadline=None)
def test_small_heads_are_pytorchs(
    data: Any, bias: bool, upstream: float, of_logsumexp: float
) -> None:
    given_options = data.draw(options(13, 11))
    tensors = case(13, 8, 11, bias=bias, dtype=torch.float64)
    of_composed = {name: v for name, v in given_options.items() if name != "chunk_rows"}
    exact = results(composed, tensors, upstream, of_logsumexp, **of_composed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_ops, "FEW_LOGITS", 13 * 11)
        patch.setattr(head_ops, "call", None)
        found = results(ours, tensors, upstream, of_logsumexp, **given_options)
        x, weight, target, *_ = tensors
        y = fn.linear_cross_entropy(x, weight, target)
        # As large as the bound, and larger.
        patch.setattr(head_ops, "FEW_LOGITS", 13 * 11 - 1)
        with pytest.raises(TypeError, match="not callable"):
            fn.linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(y, F.cross_entropy(F.linear(x, weight), target))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")
@pytest.mark.parametrize("few", [0, head_ops.FEW_LOGITS])
def test_batches_and_tangents(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `vmap`, `jvp` and what is made of them raised an error."""
    monkeypatch.setattr(head_ops, "FEW_LOGITS", few)
    x, weight = torch.randn(6, 8), torch.randn(5, 8)
    target = torch.randint(5, (6,))

    def results(loss: Any) -> list[Any]:
        def of_all(v: Tensor) -> Tensor:
            return loss(v, weight, target)

        def of_row(v: Tensor, label: Tensor) -> Tensor:
            return loss(v[None], weight, label[None])

        leaf = x.clone().requires_grad_()
        batch = torch.autograd.grad(
            of_all(leaf), leaf, torch.tensor([1.0, 2.0]), is_grads_batched=True
        )
        return [
            torch.func.vmap(torch.func.grad(of_row))(x, target),
            torch.func.jvp(of_all, (x,), (torch.ones_like(x).cumsum(1),))[1],
            torch.func.hessian(of_all)(x),
            torch.func.jacrev(of_all)(x),
            *batch,
        ]

    expected = results(lambda v, w, label: F.cross_entropy(F.linear(v, w), label))
    for found, each in zip(results(fn.linear_cross_entropy), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-5)
