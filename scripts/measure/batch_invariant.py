"""Hold batch_invariant() to its word over numbers of rows, and measure what it costs.

    python scripts/measure/batch_invariant.py [--device cuda] [--dtype bfloat16] [--seconds 0.1]

First a row's bits of y and dx are compared between batches of 1 to 16384 rows. Then calls in the
mode are timed against those without, in interleaved rounds: on a CPU by wall time, of which a fifth
of the rounds is shorter, as others may use it meanwhile; on a GPU by replays of CUDA graphs and
launched, medians. The ratios go to benchmarks/results/batch-invariant.json, from
which scripts/pages/numerics_page.py makes its table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fused_norm as fn
from benchmarks import environment
from benchmarks.runs import Timing
from benchmarks.timing import Budget, CpuTimer, GpuTimer, Rounds, Timer

MEASUREMENTS = Path(__file__).resolve().parents[2] / "benchmarks/results/batch-invariant.json"
# Of the weight, by the kind of device: K and N.
WEIGHTS = {"cpu": ((768, 3072), (1024, 1024)), "cuda": ((1024, 1024), (4096, 4096))}
DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "cuda": ("bfloat16", "float16")}
ROWS = {"cpu": (1, 16, 64, 256, 1024), "cuda": (1, 16, 64, 256, 1024, 4096, 16384)}
COMPARED = (1, 2, 3, 7, 16, 17, 64, 65, 100, 128, 129, 200, 512, 1000, 1024, 4096, 16384)
# More of them take a CPU minutes.
MOST_PRODUCTS = {"cpu": 4 * 10**9, "cuda": 10**13}
METRICS = {"cpu": ("wall",), "cuda": ("graph", "launch")}
PASSES = ("forward", "training")


class Case:
    """Parameters of a norm and a Linear layer, and rows for them.

    Args:
        device: Where.
        dtype: Of all.
        weight: K and N.
    """

    def __init__(self, device: str, dtype: torch.dtype, weight: tuple[int, int]) -> None:
        K, N = weight
        self.kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = torch.randn(N, K, **self.kind).mul_(K**-0.5).requires_grad_()
        self.gamma, self.beta = (torch.randn(K, **self.kind).requires_grad_() for _ in range(2))
        self.bias = torch.randn(N, **self.kind).requires_grad_()

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return x and dy with some rows."""
        N, K = self.weight.shape
        x = torch.randn(count, K, **self.kind).requires_grad_()
        return x, torch.randn(count, N, **self.kind)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        return fn.fused_layernorm_linear(x, self.gamma, self.beta, self.weight, self.bias)

    def inference(self, x: Tensor) -> Tensor:
        """Return y without what a backward needs."""
        with torch.no_grad():
            return self.forward(x)

    def training(self, x: Tensor, dy: Tensor) -> Tensor:
        """Return dx, having found all gradients."""
        wanted = (x, self.gamma, self.beta, self.weight, self.bias)
        return torch.autograd.grad(self.forward(x), wanted, dy)[0]


def different(case: Case, is_on: bool, most: int) -> list[int]:
    """Return the numbers of rows at which a row of y or of dx has other bits than alone."""
    x, dy = case.rows(1)
    alone: tuple[Tensor, ...] = ()
    found = []
    for count in (count for count in COMPARED if count <= most):
        all_x, all_dy = case.rows(count)
        place = count // 3
        with torch.no_grad():
            all_x[place], all_dy[place] = x[0], dy[0]
        with fn.batch_invariant() if is_on else nullcontext():
            y = case.forward(all_x)
        (dx,) = torch.autograd.grad(y, all_x, all_dy)
        row = y[place].detach().clone(), dx[place].clone()
        alone = alone or row
        if not all(map(torch.equal, alone, row)):
            found.append(count)
    return found


def costs(case: Case, count: int, budget: Budget) -> dict[str, dict[str, float]]:
    """Return the ratios of a forward and of a training step in the mode, by metric."""
    found = {}
    inputs = [case.rows(count) for _ in range(2)]
    for name in PASSES:
        steps = [_step(case, name, *each) for each in inputs]
        inside = [_inside(step) for step in steps]
        timers = {"plain": _timer(case, steps), "invariant": _timer(case, inside)}
        rounds = Rounds(timers, budget, 0)
        with fn.frozen_parameters():
            rounds.run()
        if rounds.failures:
            raise next(iter(rounds.failures.values()))
        plain, invariant = (rounds.timings(each) for each in timers)
        found[name] = {
            metric: round(_typical(metric, invariant) / _typical(metric, plain), 2)
            for metric in METRICS[case.kind["device"]]
            if metric in plain and metric in invariant
        }
    return found


def _typical(metric: str, timings: dict[str, Timing]) -> float:
    timing = timings[metric]
    return timing.p20 if metric == "wall" else timing.median


def _step(case: Case, name: str, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    if name == "forward":
        return lambda: case.inference(x)
    return lambda: case.training(x, dy)


def _inside(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return fn.batch_invariant()(step)


def _timer(case: Case, steps: Sequence[Callable[[], Tensor]]) -> Timer:
    if case.kind["device"] == "cpu":
        return CpuTimer(steps)
    return GpuTimer(steps, torch.cuda.current_stream())


def main() -> int:
    """Print a table, write it, and return an exit status: 1 where bits differ in the mode."""
    parser = argparse.ArgumentParser(description="Measure batch_invariant().")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seconds", type=float, default=0.1, help="for each of the two")
    parser.add_argument("--json", type=Path, default=MEASUREMENTS, help="the file to write to")
    options = parser.parse_args()
    device: str = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: needs a GPU")
        return 0
    budget = Budget(options.seconds, options.seconds / 2, fewest=7)
    machine = environment.describe(torch.device(device))
    name = machine.gpu or machine.cpu
    print(f"{name}, {machine.threads} threads, PyTorch {machine.torch}, {machine.fused_norm}")
    table, held = [], True
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    for dtype in options.dtype or DTYPES[device]:
        for weight in WEIGHTS[device]:
            case = Case(device, getattr(torch, dtype), weight)
            size = weight[0] * weight[1]
            most = MOST_PRODUCTS[device] // size
            without, inside = (different(case, is_on, most) for is_on in (False, True))
            held = held and not inside
            print(f"{dtype} {weight}: other bits at {without} without, at {inside} in the mode")
            for count in (count for count in ROWS[device] if count <= most):
                entry = {"dtype": dtype, "K": weight[0], "N": weight[1], "M": count}
                table.append(entry | costs(case, count, budget))
                print("  ", table[-1], flush=True)
    kept = json.loads(options.json.read_text()) if options.json.exists() else {}
    about = {"machine": name, "threads": machine.threads, "torch": machine.torch}
    about["fused_norm"] = machine.fused_norm
    about |= {"date": machine.date, "commit": machine.commit}
    kept[device] = about | {"metrics": METRICS[device], "ratios": table}
    options.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
