"""The head on a GPU against float64: Hopper's kernels, rows that they compute again, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm.chain import head_sm90
from fused_norm.chain.kernels import is_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
Case = tuple[Tensor, Tensor, Tensor, Tensor | None]


@pytest.fixture(autouse=True)
def no_sync() -> Iterator[None]:
    """Raise where the host waits for the device within a call; tests allow what they read."""
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")


def case(M: int, K: int, V: int, std: float = 1.0, bias: bool = False) -> Case:
    """Return rows whose logits have a deviation, a weight, labels of which a tenth is ignored."""
    torch.manual_seed(M + K + V)
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(V, K, device="cuda") * (std / K**0.5)).to(torch.bfloat16)
    target = torch.randint(0, V, (M,), device="cuda")
    target[::2] = V // 2
    target[torch.rand(M, device="cuda") < 0.1] = -100
    added = torch.randn(V, device="cuda").to(torch.bfloat16) if bias else None
    return x, weight, target, added


def composed(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **o: Any) -> Tensor:
    """Return PyTorch's loss in the dtype of what it gets, but no narrower than float32."""
    z = F.linear(x, weight, bias)
    z = z if z.dtype is torch.float64 else z.float()
    if softcap := o.get("softcap"):
        z = softcap * torch.tanh(z / softcap)
    class_weight = o.get("class_weight")
    losses = F.cross_entropy(
        z,
        target,
        None if class_weight is None else class_weight.to(z.dtype),
        label_smoothing=o.get("label_smoothing", 0.0),
        reduction="none",
    )
    counts = (target != -100).to(z.dtype)
    losses = losses + o.get("z_loss", 0.0) * z.logsumexp(-1).square() * counts
    weights = counts
    if class_weight is not None:
        weights = weights * class_weight.to(z.dtype)[target.clamp(0)]
    if (own := o.get("token_weight")) is not None:
        losses, weights = losses * own, weights * own
    reduction = o.get("reduction", "mean")
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


def gradients(function: Any, tensors: Case, upstream: float, **options: Any) -> list[Tensor]:
    x, weight, target, bias = tensors
    leaves = [v.detach().requires_grad_() for v in (x, weight, bias) if v is not None]
    given = leaves[2] if bias is not None else None
    loss = function(leaves[0], leaves[1], target, given, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves, torch.tensor(upstream).cuda())]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check(tensors: Case, upstream: float = 1.0, at_most: float = 2.0, **options: Any) -> None:
    """Hold the errors of ours against those of eager PyTorch."""
    wide: Any = tuple(v.double() if v is not None and v.is_floating_point() else v for v in tensors)
    exact = gradients(composed, wide, upstream, **options)
    eager = gradients(composed, tensors, upstream, **options)
    ours = gradients(fn.linear_cross_entropy, tensors, upstream, **options)
    for name, a, b, c in zip(("loss", "dx", "dweight", "dbias"), ours, eager, exact, strict=False):
        assert torch.isfinite(a).all(), name
        assert error(a, c) <= at_most * error(b, c) + 1e-5, (name, error(a, c), error(b, c))


def test_kernels_serve() -> None:
    if not is_hopper(0):
        pytest.skip("needs Hopper")
    assert head_sm90.is_at_hand()


# Rows that fill no tile, one row, vocabularies that are no multiple of anything.
@pytest.mark.parametrize(
    ("M", "K", "V"),
    [(1, 64, 7), (130, 64, 1), (77, 72, 1000), (300, 256, 32001), (513, 128, 50257)],
)
def test_sizes(M: int, K: int, V: int) -> None:
    check(case(M, K, V), at_most=2.5)


def test_many_chunks() -> None:
    check(case(1000, 256, 5003), upstream=0.25, at_most=4, chunk_rows=128)


@pytest.mark.parametrize("std", [0.1, 1.0, 4.0, 12.0, 50.0])
def test_deviations(std: float) -> None:
    check(case(500, 256, 32064, std), at_most=2)


OPTIONS: list[dict[str, Any]] = [
    {"label_smoothing": 0.1},
    {"z_loss": 1e-3},
    {"reduction": "sum"},
    {"softcap": 15.0},
    {"class_weight": True},
    {"token_weight": True},
    {"label_smoothing": 0.1, "class_weight": True, "z_loss": 1e-3},
    {"token_weight": True, "reduction": "sum", "z_loss": 1e-3},
    {"reduction": "none"},
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], bias: bool) -> None:
    tensors = case(300, 256, 4001, bias=bias)
    given = dict(options)
    if given.pop("class_weight", False):
        given["class_weight"] = torch.rand(4001, device="cuda")
    if given.pop("token_weight", False):
        given["token_weight"] = torch.rand(300, device="cuda")
    check(tensors, upstream=0.5, at_most=2.5, **given)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_computed_again(bias: bool) -> None:
    """Rows whose largest logit is far from all of those that tell the offset, in one chunk of some."""
    x, weight, target, added = case(256, 128, 4000, 0.1, bias)
    # Of the sampled classes none is odd.
    weight[1001] = 0
    weight[1001, 0] = 100
    x[:, 0] = 0
    x[::7, 0] = 4.0
    x[3, 0] = -4.0
    check((x, weight, target, added), at_most=2.5)
    check((x, weight, target, added), at_most=4, chunk_rows=64)


def test_equal_logits_and_repeated_bits() -> None:
    x, weight, target, _ = case(300, 128, 6000)
    weight[:] = weight[0]
    check((x, weight, target, None), at_most=2.5)
    tensors = case(700, 256, 9001)
    first = gradients(fn.linear_cross_entropy, tensors, 1.0, chunk_rows=256)
    for _ in range(3):
        again = gradients(fn.linear_cross_entropy, tensors, 1.0, chunk_rows=256)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_logsumexp_with_a_gradient() -> None:
    x, weight, target, _ = case(300, 128, 6000)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [v.to(dtype).requires_grad_() for v in (x, weight)]
        if dtype is torch.bfloat16:
            loss, lse = fn.linear_cross_entropy(*leaves, target, return_logsumexp=True)
        else:
            z = F.linear(*leaves)
            loss, lse = F.cross_entropy(z, target), z.logsumexp(-1)
        found.append(torch.autograd.grad(loss * 2 + (lse * 0.01).sum(), leaves))
    for ours, exact in zip(*found, strict=True):
        assert error(ours, exact) < 1e-2


def test_loss_alone_needs_little_memory() -> None:
    x, weight, target, _ = case(4096, 512, 32000)
    with torch.no_grad():
        fn.linear_cross_entropy(x, weight, target)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = fn.linear_cross_entropy(x, weight, target)
        peak = torch.cuda.max_memory_allocated() - before
        exact = F.cross_entropy(F.linear(x.double(), weight.double()), target)
    assert abs(loss.double() - exact) < 1e-4
    if is_hopper(0):
        assert peak < 4096 * 32000 * 2 / 5


def test_nothing_waits_for_the_device() -> None:
    x, weight, target, _ = case(512, 128, 4000)
    leaves = [v.requires_grad_() for v in (x, weight)]
    fn.linear_cross_entropy(*leaves, target).backward()
    torch.cuda.set_sync_debug_mode("error")
    (fn.linear_cross_entropy(*leaves, target) / 4).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, weight, target, _ = case(300, 128, 6001)
    check((x.to(dtype), weight.to(dtype), target, None), at_most=4, chunk_rows=64)
