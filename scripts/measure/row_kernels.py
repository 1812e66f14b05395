"""Measure the row kernels around PyTorch's products on a GPU, each against PyTorch's.

    python scripts/measure/row_kernels.py [--dtype float32]

Device time of one call, in microseconds: medians of interleaved rounds of CUDA-graph replays, over
inputs that do not fit the cache. The forward gives the statistics too, the backward all gradients.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Budget, GpuTimer, Rounds, Step
from fused_norm.call.record import Call
from fused_norm.native import build

SHAPES = ((64, 4096), (8192, 2048), (16384, 768), (8192, 4096), (16384, 1024))
SUM_SHAPES = ((64, 4096), (8192, 2048), (16384, 2304), (8192, 4096), (8192, 12288), (16384, 1024))
CACHE = 200e6
EPS = 1e-5

Case = Callable[[int, int, torch.dtype], tuple[Step, Step]]


def forward(rows: int, features: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Return LayerNorm by us and by PyTorch."""
    x = torch.randn(rows, features, device="cuda", dtype=dtype)
    gamma, beta = torch.randn(2, features, device="cuda", dtype=dtype)
    y, mean, rstd = torch.empty_like(x), *torch.empty(2, rows, device="cuda")
    run = _pass("normalize", x, z=y, mean=mean, rstd=rstd, gamma=gamma, beta=beta)

    def ours() -> Tensor:
        run()
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
    tensors = {"mean": mean, "rstd": rstd, "gamma": gamma, "beta": beta, "dz": dz}
    z = {"z": dz} if again else {}
    run = _pass("normalize_backward", x, dx=dx, dgamma=dgamma, dbeta=dbeta, **tensors, **z)

    def ours() -> Tensor:
        run()
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
    run = _pass("normalize_backward", dy, dy=dy, dbias=db)

    def ours() -> Tensor:
        run()
        return db

    return ours, lambda: dy.sum(0)


def _pass(name: str, x: Tensor, **tensors: Tensor) -> Callable[[], object]:
    """Return what launches a pass on the current stream, of tensors named as in the record."""
    accelerator = build.accelerator_of(x.device)
    kernels = build.load(build.Extension("passes_gpu", build.DTYPES[x.dtype], accelerator))
    call = Call(eps=EPS, M=len(x), K=x.shape[1], N=x.shape[1], x=x.data_ptr())
    for field, tensor in tensors.items():
        setattr(call, field, tensor.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    call.context = kernels.new_launcher(x.device.index, stream, True)
    place = ctypes.addressof(call)
    getattr(kernels, f"plan_{name}")(place)
    scratch = torch.empty(call.workspace_bytes, dtype=torch.uint8, device="cuda")
    call.workspace = scratch.data_ptr()
    kept = (call, scratch, tensors)

    def run() -> object:
        getattr(kernels, name)(place)
        return kept

    return run


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
    ours, theirs = (rounds.timings(name)["graph"].median for name in steps)
    return ours, theirs


if __name__ == "__main__":
    sys.exit(main())
