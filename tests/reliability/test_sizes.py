"""Sizes at the edge: more elements than 32 bits count, long rows, many rows, a single output."""

from __future__ import annotations

import pytest
import torch
from accuracy import check, eager, make_inputs
from torch import Tensor

import fused_norm as fn
from benchmarks.memory import free_bytes

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
BF16 = torch.bfloat16


def needs(gibibytes: float) -> None:
    """Skip where the GPU has less memory free."""
    torch.cuda.empty_cache()
    if free_bytes(torch.device("cuda")) < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory")


def assert_rows(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert difference < tolerance, difference


class TestBeyond32Bits:
    """Offsets of elements: above 2^31 a signed, above 2^32 an unsigned 32-bit one wraps around."""

    pytestmark = gpu

    # The last row of x, of y or of both is beyond the edge.
    @pytest.mark.parametrize(
        ("rows", "features", "outputs"),
        [
            (2**19 + 3, 4096, 64),  # x beyond 2^31
            (2**20 + 3, 4096, 64),  # x beyond 2^32
            (2**19 + 3, 64, 4096),  # y beyond 2^31
            (2**20 + 3, 64, 4096),  # y beyond 2^32
            (2**19 + 3, 4096, 4096),  # both, where Hopper takes the fused strategy
        ],
    )
    def test_rows(self, rows: int, features: int, outputs: int) -> None:
        needs(2 * 2 * rows * (2 * features + 2 * outputs) / 2**30 + 4)
        generator = torch.Generator("cuda").manual_seed(0)
        x = torch.empty(rows, features, dtype=BF16, device="cuda").normal_(generator=generator)
        parameters = make_inputs(1, features, outputs, dtype=BF16, device="cuda")[1:]
        leaves = [t.requires_grad_() for t in (x, *parameters)]
        y = fn.fused_layernorm_linear(*leaves)
        dy = torch.empty_like(y).normal_(generator=generator)
        y.backward(dy)
        for part in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
            wide = [t.detach()[part].double() if i == 0 else t.detach().double()
                    for i, t in enumerate(leaves)]  # fmt: skip
            wide[0].requires_grad_()
            exact = eager(*wide)
            exact.backward(dy[part].double())
            assert_rows(y[part], exact, 5e-3)
            assert_rows(x.grad[part], wide[0].grad, 1e-2)
        # Each row counts once: db is the column sum of dy, dbeta that of dy W.
        db = dy.float().sum(0) if dy.numel() < 2**31 else sum(c.float().sum(0) for c in dy.chunk(8))
        assert_rows(leaves[4].grad, db, 1e-2)
        assert_rows(leaves[2].grad, db @ leaves[3].detach().float(), 2e-2)

    def test_weight(self) -> None:
        outputs, features = 2**17, 2**14 + 64
        needs(8 * outputs * features / 2**30 + 4)
        weight = torch.empty(outputs, features, dtype=BF16, device="cuda").normal_()
        x = torch.randn(16, features, dtype=BF16, device="cuda")
        y = fn.fused_layernorm_linear(x, None, None, weight)
        for part in (slice(0, 8), slice(outputs - 8, outputs)):
            exact = eager(x.double(), None, None, weight[part].double(), None)
            assert_rows(y[:, part], exact, 5e-3)

    def test_layer_norms(self) -> None:
        rows, features = 2**20 + 3, 4096
        needs(2 * 4 * rows * features / 2**30 + 4)
        x = torch.empty(rows, features, dtype=BF16, device="cuda").normal_().requires_grad_()
        o = torch.full((1,), 0.1, device="cuda", requires_grad=True)
        y = fn.trainable_eps_layer_norm(x, o)
        y.backward(torch.ones_like(y))
        part = x.detach()[-8:].double()
        exact = torch.nn.functional.layer_norm(part, (features,), eps=0.01)
        assert_rows(y[-8:], exact, 5e-3)
        assert x.grad[-8:].float().abs().max() < 0.1


@pytest.mark.parametrize("batch", [65535, 65536, 70001])
def test_batches_beyond_a_grid_of_16_bits(batch: int, device: str) -> None:
    check(make_inputs((batch, 1), 8, 4, device=device, requires_grad=True))


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 33, 131, 133])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_fewer_and_more_rows_than_processors(rows: int, dtype: torch.dtype, device: str) -> None:
    check(make_inputs(rows, 256, 128, dtype=dtype, device=device, requires_grad=True))


@pytest.mark.parametrize("features", [65535, 65536, 65537, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_long_rows(features: int, dtype: torch.dtype, device: str) -> None:
    check(make_inputs(3, features, 5, dtype=dtype, device=device, requires_grad=True))


@pytest.mark.parametrize("rows", [1, 64, 1000])
@pytest.mark.parametrize("features", [1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_one_output(rows: int, features: int, dtype: torch.dtype, device: str) -> None:
    # The error of db, a single number, is a matter of luck, PyTorch's as well.
    inputs = make_inputs(rows, features, 1, dtype=dtype, device=device, requires_grad=True)
    check(inputs, factor=8.0)


def test_many_outputs(device: str) -> None:
    check(make_inputs(3, 16, 70001, device=device, requires_grad=True))


@pytest.mark.parametrize("size", range(1, 41))
def test_every_small_size(size: int, device: str) -> None:
    """Each of M, K and N up to 40: every remainder of every tile."""
    for shape in ((size, 17, 9), (9, max(size, 3), 17), (17, 9, size)):
        check(make_inputs(*shape, device=device, requires_grad=True), factor=4.0)


@pytest.mark.slow
def test_beyond_32_bits_on_a_cpu() -> None:
    """2^31 elements of float16: 4 GiB, and as much for dx."""
    if free_bytes(torch.device("cpu")) < 14 * 2**30:
        pytest.skip("needs 14 GiB of memory")
    rows, features = 2**18 + 3, 8192
    x = torch.zeros(rows, features, dtype=torch.float16)
    x[-8:] = torch.randn(8, features)
    weight = torch.randn(2, features).half()
    x.requires_grad_()
    y = fn.fused_layernorm_linear(x, None, None, weight)
    dy = torch.zeros_like(y)
    dy[-8:] = torch.randn(8, 2)
    (dx,) = torch.autograd.grad(y, x, dy)
    part = x.detach()[-8:].double().requires_grad_()
    exact = eager(part, None, None, weight.double(), None)
    exact.backward(dy[-8:].double())
    assert_rows(y[-8:], exact, 1e-3)
    assert_rows(dx[-8:], part.grad, 1e-3)
    assert not y[:-8].any()
