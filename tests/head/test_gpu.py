"""The head on a GPU against float64: Hopper's kernels, rows that they compute again, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import heads
import pytest
import torch
import torch.nn.functional as F
from heads import check, ours, results
from processes import run_python
from torch import Tensor

import fused_norm as fn
from fused_norm.chain import head_sm90
from fused_norm.chain.kernels import is_hopper
from fused_norm.cross_entropy import Head, Loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.fixture(autouse=True)
def no_sync() -> Iterator[None]:
    """Raise where the host waits for the device within a call; tests allow what they read."""
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")


def case(M: int, K: int, V: int, std: float = 1.0, bias: bool = False) -> heads.Case:
    return heads.case(M, K, V, std, bias, torch.bfloat16, "cuda")


def test_kernels_serve() -> None:
    if not is_hopper(0):
        pytest.skip("needs Hopper")
    assert head_sm90.is_built()
    x, weight, target, bias = case(2, 64, 16, bias=True)
    for loss in (Loss(), Loss(softcap=30.0), Loss(label_smoothing=0.1)):
        assert head_sm90.serves(Head(x, weight, bias, target), loss)


# Rows that fill no tile, one row, vocabularies that are not a multiple of anything.
@pytest.mark.parametrize(
    ("M", "K", "V"),
    [
        (1, 64, 7),
        (130, 64, 1),
        (77, 72, 1000),
        (300, 256, 32001),
        (513, 128, 50257),
        (40, 64, 128256),
    ],
)
def test_sizes(M: int, K: int, V: int) -> None:
    check(case(M, K, V), at_most=2.5)


def test_many_chunks() -> None:
    check(case(1000, 256, 5003), upstream=0.25, at_most=4, chunk_rows=128)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("std", [0.1, 1.0, 4.0, 12.0, 50.0])
def test_deviations(std: float, softcap: float | None) -> None:
    check(case(500, 256, 32064, std), at_most=2 if softcap is None else 2.5, softcap=softcap)


OPTIONS: list[dict[str, Any]] = [
    {"label_smoothing": 0.1},
    {"z_loss": 1e-3},
    {"reduction": "sum"},
    {"softcap": 15.0},
    {"softcap": 3.0, "z_loss": 1e-2, "class_weight": True, "token_weight": True},
    {"softcap": 3.0, "label_smoothing": 0.1},
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


@pytest.mark.parametrize("softcap", [None, 500.0])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_computed_again(bias: bool, softcap: float | None) -> None:
    """Rows whose largest logit is far above all of those that tell the offset."""
    x, weight, target, added = case(256, 128, 4000, 0.1, bias)
    # Not a multiple of 15, and so none of those classes.
    weight[1001] = 0
    weight[1001, 0] = 100
    x[:, 0] = 0
    x[::7, 0] = 4.0
    x[3, 0] = -4.0
    check((x, weight, target, added), at_most=2.5, softcap=softcap)
    check((x, weight, target, added), at_most=4, softcap=softcap, chunk_rows=64)


def test_equal_logits_and_repeated_bits() -> None:
    x, weight, target, _ = case(300, 128, 6000)
    weight[:] = weight[0]
    check((x, weight, target, None), at_most=2.5)
    tensors = case(700, 256, 9001)
    first = results(ours, tensors, chunk_rows=256)
    for _ in range(3):
        again = results(ours, tensors, chunk_rows=256)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_one_huge_logit() -> None:
    x, weight, target, _ = case(200, 128, 4001)
    weight[17] *= 200
    check((x, weight, target, None), at_most=2.5)
    check((x, weight, target, None), at_most=2.5, softcap=30.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_ignored(reduction: str) -> None:
    x, weight, target, _ = case(200, 128, 4001)
    tensors = (x, weight, torch.full_like(target, -100), None)
    found = results(ours, tensors, reduction=reduction)
    assert torch.isnan(found[0]) if reduction == "mean" else found[0] == 0
    assert all(not gradient.any() for gradient in found[2:])


def test_a_second_backward_computes_again() -> None:
    def again(x: Tensor, weight: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
        loss, lse = ours(x, weight, *others, **options)
        upstream = torch.tensor(3.0, device="cuda")
        torch.autograd.grad(loss, (x, weight), upstream, retain_graph=True)
        return loss, lse

    check(case(300, 128, 4001), upstream=3.0, at_most=2.5, function=again)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(("label", "wrong"), [(100, True), (-1, True), (99, False), (-100, False)])
def test_labels_out_of_range_are_told(label: int, wrong: bool, by_kernel: bool) -> None:
    """By an assertion on the device, as in PyTorch: it ends the process's use of the GPU."""
    program = f"""
import torch, fused_norm as fn
from fused_norm.chain import head_sm90
head_sm90.CHECKS_LABELS = {by_kernel}
x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 100))
target = torch.tensor([0, 5, -100, {label}, 3, 2, 1, 0], device="cuda")
fn.linear_cross_entropy(x, weight, target, chunk_rows=2)
torch.cuda.synchronize()
"""
    done = run_python("-c", program)
    assert (done.returncode != 0) == wrong
    # What the host was doing when it met the error names the exception.
    assert ("_assert_async_cuda_kernel" in done.stderr) == wrong


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logsumexp_with_a_gradient(reduction: str) -> None:
    check(case(300, 128, 6000), of_logsumexp=1.0, at_most=2.5, reduction=reduction)


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
