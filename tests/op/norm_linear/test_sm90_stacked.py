"""Gradients of several weights of the same rows, and of their biases, in one launch on Hopper."""

from __future__ import annotations

import ctypes

import pytest
import torch
from devices import ON_HOPPER
from kernel_harness import Guarded, assert_as_exact
from launches import names
from torch import Tensor

from fused_norm.call.record import FUSED, Call, Part
from fused_norm.chain import kernels
from fused_norm.native import build

pytestmark = [ON_HOPPER, pytest.mark.gpu]
DTYPES = [torch.bfloat16, torch.float16]
# Rows, features and the outputs of each layer: of less than a step of rows and more; that fill
# tiles and do not; of one tile and of many waves, in tiles that blocks share, and of each width.
CASES = [
    (1, 8, (8, 8)),
    (17, 40, (16, 8, 24)),
    (520, 264, (64, 128, 72)),
    (2064, 1032, (1000, 264, 136)),
    (8192, 1152, (1152, 1152, 1152)),
    (12000, 1280, (1280, 1280, 1280)),
    (4104, 1024, (1024, 1024, 1024)),
    (8192, 2048, (2048, 512, 512)),
    (4096, 512, (8, 4096)),
]
Gradients = list[tuple[Tensor, Tensor | None]]


def computed(dys: list[Tensor], z: Tensor, biases: str) -> Gradients:
    """Return dW and, for "b", db of each; no more is written."""
    name = str(z.dtype).removeprefix("torch.")
    extension = build.Extension("norm_linear_sm90", name, "nvidia:sm_90a")
    stream = torch.cuda.current_stream().cuda_stream
    module, context = kernels.launcher(extension, 0, stream, True)
    parts = (Part * len(dys))()
    results = []
    for part, dy, bias in zip(parts, dys, biases, strict=True):
        dw = Guarded((dy.shape[1], z.shape[1]), z.dtype, "cuda")
        db = Guarded((dy.shape[1],), z.dtype, "cuda") if bias == "b" else None
        part.N, part.dy, part.y = dy.shape[1], dy.data_ptr(), dw.tensor.data_ptr()
        part.bias = 0 if db is None else db.tensor.data_ptr()
        results.append((dw, db))
    call = Call(M=len(z), N=sum(part.N for part in parts), K=z.shape[1], context=context)
    call.z, call.parts, call.part_count = z.data_ptr(), ctypes.addressof(parts), len(parts)
    call.strategy = FUSED
    module.weight_gradient(ctypes.addressof(call))
    torch.cuda.synchronize()
    return [(dw.checked(), None if db is None else db.checked()) for dw, db in results]


def operands(
    M: int, K: int, outputs: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(M + K + sum(outputs))
    dys = [torch.randn(M, n, device="cuda").to(dtype) for n in outputs]
    return dys, torch.randn(M, K, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biases", ["bbb", "b-b", "--b"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: tuple[int, int, tuple[int, ...]], biases: str, dtype: torch.dtype) -> None:
    dys, z = operands(*case, dtype)
    biases = biases[-len(dys) :]
    found = computed(dys, z, biases)
    for i, (dy, (dw, db)) in enumerate(zip(dys, found, strict=True)):
        exact = dy.double().t() @ z.double()
        assert_as_exact(dw, torch.mm(dy.t(), z), exact, f"dw {i}")
        if db is not None:
            assert_as_exact(db, dy.sum(0), dy.double().sum(0), f"db {i}")
    for _ in range(3):
        for (dw, db), (other, sums) in zip(found, computed(dys, z, biases), strict=True):
            assert torch.equal(dw, other)
            assert db is None or torch.equal(db, sums)


def test_each_kernel_runs() -> None:
    """Of tiles that blocks share, and of wide and narrow ones."""
    found = set()
    for case in CASES:
        dys, z = operands(*case, torch.bfloat16)
        launched = names(lambda d=dys, z=z: computed(d, z, "b" * len(d))).split()
        (name,) = [name for name in launched if "stacked" in name]
        found.add("split" if "split" in name else "160" if "128x160" in name else "256")
    assert found == {"split", "160", "256"}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(number: float) -> None:
    dys, z = operands(2064, 264, (72, 136, 64), torch.bfloat16)
    clean = computed(dys, z, "bbb")
    dys[1][1000, 7] = number
    found = computed(dys, z, "bbb")
    for i, ((dw, db), (other, sums)) in enumerate(zip(found, clean, strict=True)):
        rows = torch.arange(len(dw), device="cuda") != (7 if i == 1 else -1)
        assert torch.equal(dw[rows], other[rows])
        assert torch.equal(db[rows], sums[rows])
    assert not found[1][0][7].isfinite().any()
    assert not found[1][1][7].isfinite()
