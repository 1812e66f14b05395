"""Measure the products of a backward on a Hopper GPU: ours and PyTorch's, in bfloat16.

    python scripts/measure/backward_products.py --json FILE [--commit COMMIT]

Of several Linear layers on the same rows, dz = sum of dy_i weight_i, by one launch and as `mm` and
`addmm`s; of a layer, dW = dy^T z, with db and without, and `mm` with our sum over rows. Device
time of one call in microseconds: medians of interleaved replays of CUDA graphs.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import describe
from benchmarks.timing import Budget, GpuTimer, Rounds, Step
from fused_norm.call.record import Call, Part
from fused_norm.native import build

# Rows, features, and the outputs of layers that share them: models' q, k and v, or gate and up.
GROUPS = (
    *((8192, 2048, (8192, 8192)), (8192, 2048, (2048, 512, 512)), (2048, 2048, (8192, 8192))),
    *((8192, 4096, (14336, 14336)), (8192, 4096, (4096, 1024, 1024))),
    *((16384, 1024, (3072, 3072)), (16384, 1024, (2048, 1024, 1024))),
    *((4096, 1024, (3072, 3072)), (8192, 1152, (1152, 1152, 1152))),
    *((12000, 1280, (1280, 1280, 1280)), (25216, 1024, (1024, 1024, 1024))),
    *((8192, 3072, (8192, 8192)), (4096, 4096, (11008, 11008)), (8192, 768, (768, 768, 768))),
    *((32768, 1024, (3072, 3072)), (8192, 5120, (13824, 13824)), (16384, 2048, (5632, 5632))),
)
# Rows, features and outputs of a layer.
LAYERS = (
    *((8192, 8192, 2048), (8192, 2048, 8192), (8192, 2048, 2048), (8192, 2048, 512)),
    *((8192, 1152, 4608), (8192, 4608, 1152), (8192, 1152, 3456), (8192, 1152, 1152)),
    *((25216, 1024, 4096), (25216, 4096, 1024), (25216, 1024, 3072), (25216, 1024, 1024)),
    *((12000, 1280, 5120), (12000, 5120, 1280), (12000, 1280, 3840), (12000, 1280, 1280)),
    *((8192, 4096, 28672), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 6144)),
    *((8192, 4096, 4096), (16384, 1024, 3072), (16384, 3072, 1024), (16384, 1024, 6144)),
    *((16384, 2048, 1024), (8192, 1600, 6400), (8192, 6400, 1600), (8192, 1600, 4800)),
    *((16384, 768, 2304), (16384, 768, 3072), (16384, 3072, 768), (4096, 1024, 4096)),
    *((4096, 4096, 4096), (2048, 4096, 11008), (8192, 5120, 5120), (32768, 1024, 4096)),
    *((8192, 2048, 128256), (16384, 1024, 2048), (16384, 4096, 1024), (8192, 3072, 3072)),
)
DTYPE = torch.bfloat16


def main() -> int:
    """Measure, print a line each, write the file, and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit")
    parser.add_argument("--seconds", type=float, default=0.08, help="for each strategy")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("SKIPPED: needs a Hopper GPU")
        return 0
    environment = dataclasses.asdict(describe(torch.device("cuda"), options.commit))
    found: dict[str, Any] = {"environment": environment, "groups": [], "layers": []}
    budget = Budget(options.seconds, options.seconds / 4, fewest=9)
    # What a launcher is made for, and a graph recorded on: PyTorch's own stream records none.
    with torch.cuda.stream(torch.cuda.Stream()):
        for M, K, Ns in GROUPS:
            _keep(found["groups"], M, K, Ns, measured(group(M, K, Ns), budget))
        for M, K, N in LAYERS:
            _keep(found["layers"], M, K, N, measured(layer(M, K, N), budget))
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _keep(cases: list[Any], M: int, K: int, N: object, us: dict[str, float]) -> None:
    cases.append({"M": M, "K": K, "N": N, "us": us})
    print(cases[-1], flush=True)


def measured(steps: dict[str, Step], budget: Budget) -> dict[str, float]:
    """Return the median microseconds of each strategy.

    Args:
        steps: What runs them.
        budget: How long to measure.
    """
    stream = torch.cuda.current_stream()
    rounds = Rounds({n: GpuTimer([step], stream) for n, step in steps.items()}, budget, 0)
    rounds.run()
    for failure in rounds.failures.values():
        raise failure
    return {name: round(rounds.timings(name)["graph"].median, 2) for name in steps}


def group(M: int, K: int, Ns: tuple[int, ...]) -> dict[str, Step]:
    """Return what computes dz of several layers.

    Args:
        M: Rows.
        K: Features.
        Ns: Outputs of each.
    """
    together = torch.randn(M, sum(Ns), device="cuda", dtype=DTYPE)
    dys = together.split(Ns, 1)
    weights = [torch.randn(n, K, device="cuda", dtype=DTYPE) for n in Ns]
    dz, other = torch.empty(2, M, K, device="cuda", dtype=DTYPE).unbind()
    parts = (Part * len(Ns))()
    for part, weight, dy in zip(parts, weights, dys, strict=True):
        part.N, part.weight, part.dy = len(weight), weight.data_ptr(), dy.data_ptr()
    call = Call(M=M, K=K, N=sum(Ns), pitch=sum(Ns), part_count=len(Ns), dz=dz.data_ptr())
    call.parts = ctypes.addressof(parts)
    run = _launched("input_gradients", call, dz, [parts, dys, weights])

    def theirs() -> Tensor:
        torch.mm(dys[0], weights[0], out=other)
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            torch.addmm(other, dy, weight, out=other)
        return other

    run()
    _check(dz, theirs())
    return {"ours": run, "pytorch": theirs}


def layer(M: int, K: int, N: int) -> dict[str, Step]:
    """Return what computes dW, and db along with it.

    Args:
        M: Rows.
        K: Features.
        N: Outputs.
    """
    dy = torch.randn(M, N, device="cuda", dtype=DTYPE)
    z = torch.randn(M, K, device="cuda", dtype=DTYPE)
    dw, other = torch.empty(2, N, K, device="cuda", dtype=DTYPE).unbind()
    db = torch.empty(N, device="cuda", dtype=DTYPE)
    steps: dict[str, Step] = {}
    for name, bias in (("ours", 0), ("ours, db", db.data_ptr())):
        call = Call(M=M, K=K, N=N, dy=dy.data_ptr(), z=z.data_ptr())
        call.dweight, call.dbias = dw.data_ptr(), bias
        steps[name] = _launched("weight_gradient", call, dw, [dy, z, db])
    rows = Call(M=M, K=N, N=N, x=dy.data_ptr(), dy=dy.data_ptr(), dbias=db.data_ptr())
    sums = _launched("normalize_backward", rows, db, [dy], "passes_gpu")

    def theirs() -> Tensor:
        torch.mm(dy.t(), z, out=other)
        return other

    def with_sums() -> Tensor:
        sums()
        return theirs()

    steps["ours"]()
    _check(dw, theirs())
    return {**steps, "pytorch": theirs, "pytorch, db": with_sums}


def _launched(
    name: str, call: Call, result: Tensor, kept: list[Any], kernels: str = "norm_linear_sm90"
) -> Callable[[], Tensor]:
    """Return what launches a kernel on the current stream, whether its plan would or not."""
    accelerator = build.accelerator_of(torch.device("cuda", 0))
    module = build.load(build.Extension(kernels, build.DTYPES[DTYPE], accelerator))
    call.context = module.new_launcher(0, torch.cuda.current_stream().cuda_stream, True)
    place = ctypes.addressof(call)
    getattr(module, f"plan_{name}")(place)
    room = max(call.workspace_bytes, 4 * call.N * (call.K + 1))
    scratch = torch.empty(room, dtype=torch.uint8, device="cuda")
    call.workspace = scratch.data_ptr()
    # What the kernel reads and writes by address.
    held = (call, scratch, kept)

    def run() -> Tensor:
        assert held
        getattr(module, name)(place)
        return result

    return run


def _check(found: Tensor, expected: Tensor) -> None:
    """Raise if two results differ by more than their rounding."""
    distance = (found.double() - expected.double()).norm() / expected.double().norm()
    if not distance < 0.01:
        raise RuntimeError(f"results differ by {float(distance):.2g}")


if __name__ == "__main__":
    sys.exit(main())
