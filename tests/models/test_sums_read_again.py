"""Sums that a call computes, where other readers than the norm read them under another name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_within_budget
from compiling import with_sites
from torch import Tensor

K, N = 24, 40
Function = Callable[..., tuple[Tensor, ...]]


def dropout(s: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """In evaluation, as transformers write it after an attention's output."""
    rows = F.dropout(s, 0.1, False)
    return F.linear(F.layer_norm(rows, (K,)), w), rows.sin()


def contiguous(s: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rows = s.contiguous()
    return F.linear(F.layer_norm(rows, (K,)), w), rows.sin()


def reciprocal_root(s: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    root = torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(s * root, w), root


def length(s: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    norm = s.norm(dim=-1, keepdim=True)
    return F.linear(s / norm.clamp(min=1e-6), w), norm


def weight_of_the_rows(s: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """No call can add before this reader: it needs the weight, which is computed of that."""
    rows = s * 1.0
    mean = rows.sin().mean()
    return F.linear(F.layer_norm(rows, (K,)), w * mean), rows.sin()


def two_norms(s: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    root = torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(s * root, w), F.linear(s * root * w[0], w)


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "plain"])
@pytest.mark.parametrize(
    "read", [dropout, contiguous, reciprocal_root, length, weight_of_the_rows, two_norms]
)
def test_sum_that_another_node_reads(read: Function, in_place: bool) -> None:
    """Regression: with a sum in place, calls added the residual twice."""

    def function(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        s = x * 2
        if in_place:
            s += r
        else:
            s = s + r
        return read(s, w)

    compiled, sites = with_sites(function)
    torch.manual_seed(0)
    given = [torch.randn(s, requires_grad=True) for s in ((2, 5, K), (2, 5, K), (N, K))]
    exact = [t.detach().double().requires_grad_() for t in given]
    found, bars, truths = (
        [*(ys := each(*of)), *torch.autograd.grad([y.sum() for y in ys], of)]
        for each, of in ((compiled, given), (function, given), (function, exact))
    )
    assert all(site.fused for site in sites)
    for i, (y, bar, truth) in enumerate(zip(found, bars, truths, strict=True)):
        assert_within_budget(f"result {i}", y, truth, bar)
