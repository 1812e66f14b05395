"""What is around the head's Hopper kernels, with PyTorch's ops in their place, against float64."""

from __future__ import annotations

from typing import Any

import head_kernels
import pytest
import torch
import torch.nn.functional as F
from heads import case, check
from mojo_programs import printed

import fused_norm as fn
from fused_norm.call.head_record import HeadCall
from fused_norm.chain import head, head_sm90
from fused_norm.cross_entropy import Head, Loss

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none", "of_logsumexp": 1.0},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"softcap": 3.0, "chunk_rows": 32},
    {"softcap": 30.0, "z_loss": 1e-2, "reduction": "sum"},
    {"softcap": 3.0, "reduction": "none", "of_logsumexp": 1.0},
]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Put PyTorch's ops in the kernels' place; return whether these would serve each call."""
    asked: list[bool] = []

    def serves(t: Head, loss: Loss) -> bool:
        asked.append(head_sm90.can_do(loss))
        return asked[-1]

    monkeypatch.setattr(head_sm90, "serves", serves)
    monkeypatch.setattr(head_sm90, "run", head_kernels.run)
    return asked


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], bias: bool, weighted: bool, served: list[bool]) -> None:
    tensors = case(67, 32, 301, bias=bias, dtype=torch.bfloat16)
    given = dict(options)
    if weighted:
        given |= {"class_weight": torch.rand(301), "token_weight": torch.rand(67)}
    check(tensors, upstream=0.5, at_most=2.5, **given)
    assert served
    assert all(served)


@pytest.mark.parametrize("softcap", [None, 10.0, 200.0])
@pytest.mark.parametrize("std", [0.1, 1.0, 12.0, 50.0])
def test_deviations(std: float, softcap: float | None, served: list[bool]) -> None:
    check(case(200, 64, 1000, std, dtype=torch.bfloat16), at_most=2.5, softcap=softcap)
    assert all(served)


@pytest.mark.parametrize("softcap", [None, 500.0])
def test_rows_computed_again(softcap: float | None, served: list[bool]) -> None:
    """Rows whose largest logit is far above all of those that tell the offset."""
    x, weight, target, _ = case(64, 128, 4000, 0.1, dtype=torch.bfloat16)
    # No multiple of 15, and so none of those classes.
    weight[1001] = 0
    weight[1001, 0] = 100
    x[:, 0] = 0
    x[::7, 0] = 4.0
    check((x, weight, target, None), at_most=2.5, softcap=softcap)
    assert all(served)


def test_a_softcap_with_smoothed_labels_is_left_to_pytorch(served: list[bool]) -> None:
    tensors = case(67, 32, 301, dtype=torch.bfloat16)
    check(tensors, at_most=2.5, softcap=3.0, label_smoothing=0.1)
    assert served
    assert not any(served)


@pytest.mark.parametrize(("chunk_rows", "count"), [(None, 1), (100, 6)])
def test_loss_alone_takes_all_rows_at_once(
    chunk_rows: int | None, count: int, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exponentials are stored, so that memory does not tell how many rows there may be."""
    rows: list[int] = []

    def run(function: str, call: HeadCall, device: torch.device) -> None:
        if function == "exponentials":
            rows.append(call.M)
        head_kernels.run(function, call, device)

    monkeypatch.setattr(head, "GPU_ROWS", 64)
    monkeypatch.setattr(head, "CPU_ROWS", 64)
    monkeypatch.setattr(head_sm90, "run", run)
    x, weight, target, _ = case(600, 32, 301, dtype=torch.bfloat16)
    loss = fn.linear_cross_entropy(x, weight, target, chunk_rows=chunk_rows)
    exact = F.cross_entropy(F.linear(x.double(), weight.double()), target)
    assert abs(loss.double() - exact) < 1e-5
    assert rows == [600 // count] * count
    few = head_sm90.rows_of_sums(128 * 4096)
    assert few * 4096 * 2 * 4 == head_sm90._SUMS_BYTES


def test_labels_out_of_range(served: list[bool]) -> None:
    """Found behind the kernels, for which they are no labels."""
    x, weight, _, _ = case(67, 32, 301, dtype=torch.bfloat16)
    for label in (301, -1):
        target = torch.full((67,), 300)
        target[40] = label
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            fn.linear_cross_entropy(x.clone().requires_grad_(), weight, target)
    assert all(served)


@pytest.mark.parametrize("cap", [1, 30, 1000])
def test_softcap(cap: int) -> None:
    """The formulas of op/head/softcap.mojo, compiled for this machine."""
    numbers = [-(10**6), -3000, -301, -100, -31, -7, -1, 0, 1, 2, 29, 30, 64, 250, 1000, 9000]
    z = torch.tensor(numbers, dtype=torch.float64) / 8
    found = torch.tensor(
        [list(map(float, line.split())) for line in printed("softcap", [], [(cap, *numbers)])],
        dtype=torch.float64,
    )
    t = torch.tanh(z / cap)
    # An error of u is one of the cap; slopes have all their bits, however small.
    torch.testing.assert_close(found[:, 0], cap * t, rtol=1e-6, atol=3e-7 * cap)
    slope = 1 / torch.cosh(z / cap).square()
    torch.testing.assert_close(found[:, 1], slope, rtol=2e-5, atol=1e-37)
