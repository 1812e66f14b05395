"""What is around the head's Hopper kernels, with PyTorch's ops in their place, against float64."""

from __future__ import annotations

from typing import Any

import head_kernels
import pytest
import torch
import torch.nn.functional as F
from heads import case, check
from hypothesis import given
from hypothesis import strategies as st
from mojo_programs import printed

import fused_norm as fn
from fused_norm.call.head_record import HeadCall
from fused_norm.chain import head, head_sm90, head_tiles
from fused_norm.cross_entropy import Head, Loss
from fused_norm.head import SMALL_ROWS

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
    more = dict(options)
    if weighted:
        more |= {"class_weight": torch.rand(301), "token_weight": torch.rand(67)}
    check(tensors, upstream=0.5, at_most=2.5, **more)
    assert served
    assert all(served)


@pytest.fixture
def queued(served: list[bool], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Have our product compute the gradient of x; return the functions that run, and their rows."""
    found: list[tuple[str, int]] = []

    def run(function: str, call: HeadCall, device: torch.device) -> None:
        found.append((function, call.M))
        head_kernels.run(function, call, device)

    monkeypatch.setattr(head_sm90, "OWN_DX", True)
    monkeypatch.setattr(head_sm90, "run", run)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_of_x_by_our_product(
    options: dict[str, Any], bias: bool, queued: list[tuple[str, int]]
) -> None:
    check(case(67, 32, 301, bias=bias, dtype=torch.bfloat16), 0.5, at_most=2.5, **options)
    names = [name for name, _ in queued]
    # With no reduction, the forward computes no gradient.
    passes = 2 if options.get("reduction") == "none" else 1
    chunks = 0 if "label_smoothing" in options else names.count("rows") // passes
    assert names.count("input_gradient") == chunks


def test_gradient_of_x_where_rows_are_not_dense(queued: list[tuple[str, int]]) -> None:
    x, weight, target, _ = case(67, 32, 301, dtype=torch.bfloat16)
    check((x.t().contiguous().t(), weight, target, None), at_most=2.5, chunk_rows=32)
    assert ("input_gradient", 1) not in queued
    queued.clear()
    fn.linear_cross_entropy(x, weight.requires_grad_(), target).backward()
    assert [name for name, _ in queued] == ["exponentials", "rows"]


@pytest.mark.parametrize("softcap", [None, 10.0, 200.0])
@pytest.mark.parametrize("std", [0.1, 1.0, 12.0, 50.0])
def test_deviations(std: float, softcap: float | None, served: list[bool]) -> None:
    check(case(200, 64, 1000, std, dtype=torch.bfloat16), at_most=2.5, softcap=softcap)
    assert all(served)


@pytest.mark.parametrize("softcap", [None, 500.0])
def test_rows_computed_again(softcap: float | None, served: list[bool]) -> None:
    """Rows whose largest logit is far above all of those that tell the offset."""
    x, weight, target, _ = case(64, 128, 4000, 0.1, dtype=torch.bfloat16)
    # Not a multiple of 15, and so none of those classes.
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


# Rows, features, vocabulary: LLaMA-1B, LLaMA-8B, Qwen3-0.6B, GPT-2, each with GiB that the head may
# take with all gradients, in chunks of both sizes.
SIZES = [
    (8192, 2048, 128256, 1.6, 1.1),
    (8192, 4096, 128256, 2.2, 1.65),
    (16384, 1024, 151936, 1.6, 1.0),
    (16384, 768, 50304, 0.55, 0.35),
]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("M", "K", "V", "gib", "small_gib"), SIZES)
def test_chunks_fill_the_device(
    M: int, K: int, V: int, gib: float, small_gib: float, small: bool
) -> None:
    """Of an H100's SMs, the model leaves 3 % idle, in chunks that take no more memory."""
    most = SMALL_ROWS if small else head.GPU_ROWS
    rows = head_tiles.rows_of_chunk(M, K, V, most, 132)
    assert rows == most
    tile = head_tiles.best_tile(rows, K, V, 132)
    splits = small and K <= 1024
    assert tile[:2] == (192 if K == 768 else 256, splits)
    waves, busy = tile.waves(rows, K, 132)
    assert waves == max(K * rows >> 22, 1)
    assert busy > 0.96
    # Exponentials; the weight's gradient; rows, normalized and scaled, and theirs; samples, sums.
    numbers = rows * V + V * K + 2 * M * K + rows * K + 256 * M
    numbers += 2 * 2 * rows * -(-V // head_sm90.COLUMNS)
    assert 2 * numbers < (small_gib if small else gib) * 2**30


def test_chunks_of_fewer_rows_where_these_fill_the_device() -> None:
    """5 tiles of 256 columns and 16 clusters' rows would leave the second wave almost idle."""
    rows = head_tiles.rows_of_chunk(16384, 1280, 50304, 4096, 132)
    tile = head_tiles.best_tile(rows, 1280, 50304, 132)
    assert (rows, tile[:2]) == (3328, (256, False))
    assert tile.waves(rows, 1280, 132) == (1, 65 / 66)
    assert tile.waves(4096, 1280, 132) == (2, 80 / 132)


@given(
    M=st.integers(1, 40000),
    K=st.integers(1, 1024).map(lambda n: 8 * n),
    V=st.integers(1, 200000),
    most=st.integers(1, 9000),
    processors=st.sampled_from([78, 114, 132]),
)
def test_chunks_have_no_more_rows_than_may_be(
    M: int, K: int, V: int, most: int, processors: int
) -> None:
    rows = head_tiles.rows_of_chunk(M, K, V, most, processors)
    assert min(most, M) // 4 < rows <= most
    tile = head_tiles.best_tile(rows, K, V, processors)
    assert not tile.is_split or V > 64
    assert 0 < tile.waves(rows, K, processors)[1] <= 1


@pytest.mark.parametrize(("M", "K", "V"), [size[:3] for size in SIZES])
def test_loss_alone_fills_the_device(M: int, K: int, V: int) -> None:
    rows = head.rows_of_chunk(M, V, head_sm90.rows_of_sums(V), False)
    clusters = -(-rows // 256) * -(-V // head_sm90.COLUMNS)
    assert clusters / 66 / -(-clusters // 66) > 0.99


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


@pytest.mark.parametrize("by_kernel", [False, True])
def test_labels_out_of_range(
    by_kernel: bool, served: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found behind the kernels, for which they are no labels, or by these."""
    monkeypatch.setattr(head_sm90, "CHECKS_LABELS", by_kernel)
    checked: list[int] = []
    check_labels = head.check_labels
    monkeypatch.setattr(
        head, "check_labels", lambda t, loss: (checked.append(1), check_labels(t, loss))
    )
    x, weight, target, _ = case(67, 32, 301, dtype=torch.bfloat16)
    fn.linear_cross_entropy(x, weight, target, chunk_rows=20)
    assert bool(checked) != by_kernel
    for label in (301, -1):
        target = torch.full((67,), 300)
        target[40] = label
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            fn.linear_cross_entropy(x.clone().requires_grad_(), weight, target, chunk_rows=20)
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
