"""Write docs/numerics.md: how sums are taken, and how far results are from float64 on this CPU.

python scripts/pages/numerics_page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm.call.record import FUSED
from fused_norm.chain import kernels

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"
COSTS = PAGE.parent.parent / "benchmarks" / "results" / "batch-invariant.json"
PASSES = ("forward", "training")
METRICS = {"wall": "time", "graph": "in a CUDA graph", "launch": "launched"}
DEVICES = {"cpu": "{threads} threads, PyTorch {torch}", "cuda": "PyTorch {torch}"}
NODE = {True: "through the C++ node", False: "through Python as well"}
SIZES = (512, 768, 384)
MEANS = (0, 1, 10, 100, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = ("y", "dx", "dln_weight", "dln_bias", "dlinear_weight", "dlinear_bias")
EPS = 1e-5

INTRODUCTION = """\
<!-- `scripts/pages/numerics_page.py` writes this page and measures its tables; do not edit it. -->

# Numerics

How sums are computed, how far results are from float64, and when two runs give the same bits.

Statistics, products and sums are computed in float32 (float64 for float64). The mean and rstd that
the backward reads are kept in it too. Results are rounded once, to the dtype of their tensors.

## A row's mean and variance

The variance is the mean of squared deviations. No kernel uses $E[x^2] - E[x]^2$, which subtracts
numbers of the size of the squared mean: in float32, no digit is correct from mean/std = 4096 on.

- **CPU**: two passes over a row in cache. The first computes a center from the differences to the
  row's first element. The second sums the deviations from that center, and their squares. The sum
  of the deviations corrects both the mean and the variance.
- **GPU**: the same, on a row in registers. A row that is too long for them is read again.
- **Hopper, bfloat16**: one pass over the deviations from the average of the row's first elements.

On a CPU, and on a GPU outside Hopper's bfloat16, a constant row gives exactly what a row of zeros
gives.

## Products and sums

- **CPU, forward**: normalized rows enter the product in float32; on AMX tiles, in bfloat16 (also
  with AVX-512 BF16 on AMD's CPUs, where `batch_invariant` runs our product). To keep the error of
  long sums small, 128 products (512 in bfloat16) are summed before they join the total. On AMX
  tiles, 32 at a time join one sum, and subnormal numbers count as zeros.
- **CPU, backward**: the product of dy and the normalized rows, before `ln_weight` is applied, gives
  the gradients of `ln_weight` and `linear_weight`. For up to 192 rows, the gradients of `ln_weight`
  and `ln_bias` come from the product of dy and `linear_weight` instead, which the gradient of x
  needs anyway; rows then enter the product for `linear_weight` scaled and shifted. dy is summed
  over rows in float64.
- **GPU**: normalized rows are rounded to the dtype of x, as in PyTorch, and enter PyTorch's
  products. For the gradients of `ln_weight` and `ln_bias`, each block sums some rows, and a second
  kernel adds those sums in a fixed order.
- **Hopper, bfloat16, forward**, with a fold: no normalized row is rounded. Instead, `linear_weight`
  times `ln_weight`, minus each row's mean, is rounded. rstd, mean and biases are applied to float32
  sums.
- **Hopper, bfloat16 and float16, backward**: our own products of dy and `linear_weight`, and of dy
  and the normalized rows. The first is rounded to the dtype of x before the norm's backward reads
  it; so are the normalized rows, which are computed again. Each product sums in float32. Sums over
  rows, also for `linear_bias`, stay in registers and are added in a fixed order.
- **Hopper, float16, forward**: normalized rows are rounded to float16, as in PyTorch.
- **Hopper, float32, forward**, if PyTorch may use TF32
  (`torch.backends.cuda.matmul.fp32_precision`): normalized rows and weights are rounded to TF32, to
  nearest, and summed in float32. x itself is never rounded, since at mean/std = 1000 nothing would
  be left of it. The backward is that of any GPU.
- **MAX graphs**: on a CPU, the same kernels and bits, on AMX tiles if MAX [compiles for
  them](max.md). On a GPU, the same row passes around the vendor's BLAS, without TF32.

## The same bits every time

The shape decides the order of every sum; no kernel of the library uses atomic additions.

On a CPU, the bits of our products depend on the instruction set, but not on the number of threads
or on other rows of the batch. PyTorch's products, which run where they are faster, choose their
kernel by the number of rows.

On a GPU, the same call gives the same bits. The number of rows decides which kernel PyTorch uses
for its products, and on Hopper which tile and strategy ours use.

## Bits that do not depend on the batch

In [`batch_invariant()`](guide/batch-invariant.md), the bits of a row of y and of dx do not depend
on other rows of the batch. All products of rows are then ours; on Hopper, they multiply normalized
rows. Tiles of all shapes sum in the same order. The kernel for few rows, in which two blocks share
a sum, is not used. Tests compare the bits of batches of 1 to 16384 rows.

The mode costs most for few rows with a large weight, which fewer blocks then read. Calls that are
launched one by one also wait for Python, which dispatches them in this mode.

#COSTS#
## What the tests require

For every dtype and shape, the error of the output and of each gradient must be at most twice the
sum of PyTorch's own error in that dtype and half a unit in the last place. The error is the
Frobenius norm of the difference from float64, computed from the same rounded inputs.

"""


def main() -> int:
    """Write the page and return an exit status."""
    # Calls for which PyTorch's ops are faster would be left to them.
    kernels.cpu_strategy = lambda: FUSED
    PAGE.write_text(page())
    return 0


def page() -> str:
    """Return the page, with tables measured now."""
    rows, features, outputs = SIZES
    text = INTRODUCTION.replace("#COSTS#\n", costs()) + (
        f"## Measured on a CPU\n\n{rows} rows, {features} features, {outputs} outputs. Each cell "
        "has two errors against float64:\nthat of our kernels, then that of PyTorch "
        "(`F.linear(F.layer_norm(x))`).\n"
    )
    for dtype in DTYPES:
        text += f"\n### {str(dtype).removeprefix('torch.')}\n\n"
        text += f"| mean/std | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}\n"
        for mean in MEANS:
            ours, theirs = errors(dtype, mean)
            cells = (f"{mine:.1e}, {other:.1e}" for mine, other in zip(ours, theirs, strict=True))
            text += f"| {mean} | {' | '.join(cells)} |\n"
    return text


def costs() -> str:
    """Return tables of what `batch_invariant()` costs, from what was measured."""
    text = ""
    for kind, found in json.loads(COSTS.read_text()).items():
        metrics = found["metrics"]
        heads = [f"{name}, {METRICS[metric]}" for metric in metrics for name in PASSES]
        text += (
            "LayerNorm + Linear: time in the mode relative to the time outside it, where calls go "
            f"{NODE['node' in found['fused_norm']]}, on {found['machine']}, "
            f"{DEVICES[kind].format(**found)} (`scripts/measure/batch_invariant.py`).\n\n"
            f"| dtype | K, N | rows | {' | '.join(heads)} |\n|---|---|---|{'---|' * len(heads)}\n"
        )
        for entry in found["ratios"]:
            cells = [f"{entry[name][metric]:.2f}" for metric in metrics for name in PASSES]
            place = f"{entry['dtype']} | {entry['K']}, {entry['N']} | {entry['M']}"
            text += f"| {place} | {' | '.join(cells)} |\n"
        text += "\n"
    return text


def errors(dtype: torch.dtype, mean: float) -> tuple[list[float], list[float]]:
    """Return our relative errors and PyTorch's, of what `COLUMNS` names."""
    generator = torch.Generator().manual_seed(0)
    rows, features, outputs = SIZES

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = [
        normal(rows, features) + mean,
        1 + 0.2 * normal(features),
        0.2 * normal(features),
        normal(outputs, features) / features**0.5,
        0.2 * normal(outputs),
        normal(rows, outputs),
    ]
    rounded = [tensor.to(dtype) for tensor in inputs]
    truth = _results(_eager, [tensor.double() for tensor in rounded])
    return (
        _relative(_results(fn.fused_layernorm_linear, rounded), truth),
        _relative(_results(_eager, rounded), truth),
    )


def _eager(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), weight, bias)


def _results(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the output and the five gradients."""
    *inputs, grad_output = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_output)]


def _relative(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [
        float((result.double() - exact).norm() / exact.norm())
        for result, exact in zip(results, truth, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
