"""Row programs written in a few lines show that the combinator is general."""

from __future__ import annotations

import pytest
import torch
from kernel_harness import Guarded, address, assert_as_exact, extension
from test_row_kernels import DTYPES, every_device

SHAPES = [(1, 1), (40, 7), (33, 96), (50, 769), (20, 4096), (20, 5001), (17, 70000)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def run(name: str, like: torch.Tensor, *arguments: torch.Tensor | int) -> None:
    values = [a if isinstance(a, int) else address(a) for a in arguments]
    on_gpu = like.device.type == "cuda"
    place = (0, torch.cuda.current_stream().cuda_stream) if on_gpu else (-1, 0)
    kernels = extension("row_programs", like.dtype, "tests/mojo", gpu=on_gpu)
    getattr(kernels, name)(*values, *place)


@every_device
@every_shape
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_softmax(dtype, shape, device):
    x = torch.randn(shape, device=device, dtype=dtype) * 3
    y = Guarded(shape, dtype, device)
    run("softmax", x, y.tensor, x, *shape)
    exact = torch.softmax(x.double(), 1)
    assert_as_exact(y.checked(), torch.softmax(x, 1), exact, "softmax")


@every_device
def test_softmax_of_nan_and_infinity(device):
    x = torch.randn(4, 300, device=device)
    x[1, 100], x[2, 200] = float("nan"), -float("inf")
    y = torch.empty_like(x)
    run("softmax", x, y, x, *x.shape)
    assert y.isnan().any(1).tolist() == [False, True, False, False]
    torch.testing.assert_close(y[[0, 2, 3]], torch.softmax(x, 1)[[0, 2, 3]])


@every_device
@every_shape
def test_rms_norm(shape, device):
    x = torch.randn(shape, device=device)
    gamma = torch.randn(shape[1], device=device)
    y = Guarded(shape, x.dtype, device)
    run("rms_norm", x, y.tensor, x, gamma, *shape)
    exact = torch.nn.functional.rms_norm(x.double(), shape[1:], gamma.double(), 1e-6)
    peer = torch.nn.functional.rms_norm(x, shape[1:], gamma, 1e-6)
    assert_as_exact(y.checked(), peer, exact, "rms_norm")


@every_device
@every_shape
def test_results_that_are_not_broadcast(shape, device):
    x = torch.randint(-8, 9, shape, device=device).float()
    y = Guarded(shape, x.dtype, device)
    total, smallest = (Guarded(shape[:1], x.dtype, device) for _ in range(2))
    run("measured", x, y.tensor, total.tensor, smallest.tensor, x, *shape)
    exact = 2 * x - 2 * x.sum(1, keepdim=True)
    assert torch.equal(y.checked(), exact)
    assert torch.equal(total.checked(), x.sum(1))
    assert torch.equal(smallest.checked(), exact.amin(1))


@every_shape
def test_sums_over_rows_on_the_cpu(shape):
    M, K = shape
    dy, x = torch.randn(2, *shape)
    gamma = torch.randn(K)
    _, mean, rstd = torch.native_layer_norm(x, (K,), None, None, 1e-5)
    dx, dgamma, dbeta = (
        Guarded(shape, x.dtype, "cpu"),
        *(Guarded((K,), x.dtype, "cpu") for _ in range(2)),
    )
    tensors = (dx.tensor, dgamma.tensor, dbeta.tensor, dy, x, mean, rstd, gamma)
    kernels = extension("row_programs", x.dtype, "tests/mojo")
    kernels.layernorm_backward(*map(address, tensors), M, K)
    high = [t.double() for t in (dy, x, mean, rstd, gamma)]
    backward = torch.ops.aten.native_layer_norm_backward
    mask = [True, True, True]
    exact = backward(*high[:2], (K,), *high[2:4], high[4], high[4], mask)
    peer = backward(dy, x, (K,), mean, rstd, gamma, gamma, mask)
    for name, ours, theirs, best in zip(
        ("dx", "dgamma", "dbeta"), (dx, dgamma, dbeta), peer, exact, strict=True
    ):
        assert_as_exact(ours.checked(), theirs, best, name)
