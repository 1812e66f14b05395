"""Measure the row kernels of the composed way on a GPU, each beside PyTorch's.

    python scripts/row_kernels.py [--dtype float32]

Device time of one call, in microseconds: medians of interleaved rounds of CUDA-graph replays, over
inputs that do not fit the cache. The forward gives the statistics too, the backward all gradients.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import _gpu
from fused_norm.bench.timing import Budget, GpuTimer, Rounds, Step

SHAPES = ((64, 4096), (8192, 2048), (16384, 768), (8192, 4096), (16384, 1024))
SUM_SHAPES = ((64, 4096), (8192, 2048), (16384, 2304), (8192, 4096), (8192, 12288), (16384, 1024))
CACHE = 200e6
EPS = 1e-5

Case = Callable[[int, int, torch.dtype], tuple[Step, Step]]


def forward(rows: int, features: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Return LayerNorm by us and by PyTorch."""
    x = torch.randn(rows, features, device="cuda", dtype=dtype)
    gamma, beta = torch.randn(2, features, device="cuda", dtype=dtype)
    y, statistics = torch.empty_like(x), torch.empty(2, rows, device="cuda")
    kernels = _gpu.launcher("norm_linear_gpu", x)

    def ours() -> Tensor:
        mean, rstd = statistics.data_ptr(), statistics.data_ptr() + 4 * rows
        tensors = (y.data_ptr(), mean, rstd, x.data_ptr(), gamma.data_ptr(), beta.data_ptr())
        kernels.layernorm_forward(*tensors, rows, features, EPS, False, 0)
        return y

    return ours, lambda: F.layer_norm(x, (features,), gamma, beta, EPS)


def backward(rows: int, features: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Return the gradients of LayerNorm by us and by PyTorch."""
    return _backward(rows, features, dtype, again=False)


def backward_and_rows(rows: int, features: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Return the gradients with the normalized rows, which PyTorch takes a forward for."""
    return _backward(rows, features, dtype, again=True)


def _backward(rows: int, features: int, dtype: torch.dtype, *, again: bool) -> tuple[Step, Step]:
    x, dz = torch.randn(2, rows, features, device="cuda", dtype=dtype)
    gamma, beta, dgamma, dbeta = torch.randn(4, features, device="cuda", dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, (features,), gamma, beta, EPS)
    dx = torch.empty_like(x)
    kernels = _gpu.launcher("norm_linear_gpu", x)
    size = kernels.backward_workspace(rows, features, 0)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def ours() -> Tensor:
        kernels.backward(
            *(dx.data_ptr(), dgamma.data_ptr(), dbeta.data_ptr(), 0),
            *(dz.data_ptr() if again else 0, dz.data_ptr(), 0, x.data_ptr()),
            *(gamma.data_ptr(), beta.data_ptr(), mean.data_ptr(), rstd.data_ptr()),
            *(workspace.data_ptr(), rows, features, 1, EPS, False, 0),
        )
        return dx

    def theirs() -> Tensor:
        if again:
            F.layer_norm(x, (features,), gamma, beta, EPS)
        arguments = (dz, x, (features,), mean, rstd, gamma, beta, [True, True, True])
        gradient: Tensor = torch.ops.aten.native_layer_norm_backward(*arguments)[0]
        return gradient

    return ours, theirs


def column_sums(rows: int, outputs: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Return the sum over rows by us and by PyTorch."""
    dy = torch.randn(rows, outputs, device="cuda", dtype=dtype)
    db = torch.empty(outputs, device="cuda", dtype=dtype)
    kernels = _gpu.launcher("norm_linear_gpu", dy)
    size = kernels.backward_workspace(rows, 0, outputs)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def ours() -> Tensor:
        nothing = (0, 0, 0, 0, 0)
        kernels.backward(
            *(0, 0, 0, db.data_ptr(), 0, 0, dy.data_ptr(), *nothing),
            *(workspace.data_ptr(), rows, 1, outputs, EPS, False, 0),
        )
        return db

    return ours, lambda: dy.sum(0)


# What is measured: its shapes, and how many tensors of M x K it reads and writes.
CASES: dict[str, tuple[Case, Sequence[tuple[int, int]], int]] = {
    "LayerNorm": (forward, SHAPES, 2),
    "LayerNorm backward": (backward, SHAPES, 3),
    "LayerNorm backward and z": (backward_and_rows, SHAPES, 4),
    "sum over rows": (column_sums, SUM_SHAPES, 1),
}


def main() -> int:
    """Print a table, and return an exit status."""
    parser = argparse.ArgumentParser(description="Measure the row kernels of the GPU.")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each of the two")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("SKIPPED: needs a GPU")
        return 0
    dtype: torch.dtype = getattr(torch, options.dtype)
    budget = Budget(options.seconds, options.seconds / 4, fewest=9)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
    print(f"| {options.dtype} | shape | ours, us | TB/s | PyTorch, us | ratio |")
    print("|---|---|---|---|---|---|")
    for name, (case, shapes, tensors) in CASES.items():
        for rows, columns in shapes:
            moved = tensors * rows * columns * dtype.itemsize
            ours, theirs = _measured(case, rows, columns, dtype, math.ceil(CACHE / moved), budget)
            ratio, speed = ours / theirs, moved / ours / 1e6
            cells = (name, f"{rows}x{columns}", f"{ours:.1f}", f"{speed:.2f}", f"{theirs:.1f}")
            print("|", " | ".join(cells), f"| {ratio:.2f} |", flush=True)
    return 0


def _measured(
    case: Case, rows: int, columns: int, dtype: torch.dtype, sets: int, budget: Budget
) -> tuple[float, float]:
    """Return the medians of ours and of PyTorch's, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pairs = [case(rows, columns, dtype) for _ in range(max(2, min(sets, 64)))]
    steps = {"ours": [ours for ours, _ in pairs], "theirs": [theirs for _, theirs in pairs]}
    rounds = Rounds({name: GpuTimer(each, stream) for name, each in steps.items()}, budget, 0)
    rounds.run()
    if rounds.failures:
        raise next(iter(rounds.failures.values()))
    # Two steps, so a pair: mypy does not count them.
    return tuple(rounds.timings(name)["graph"].median for name in steps)  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(main())
