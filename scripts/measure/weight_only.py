"""Measure what a pass of ours gains in front of torchao's int8 weight-only layers, on this CPU.

    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
    python scripts/measure/weight_only.py [--rounds 31] [--json FILE]

A model of LLaMA's blocks in inference, its Linear layers quantized, compiled by Inductor or run as
traced: as it is, once more as a control, and with each sum and norm in one pass of ours. The ratios
are medians over interleaved rounds. Each pass is first compared with float64.
The variables let glibc keep memory: without them, torchao's float32 weights of each call are new
pages, which take longer than all else, and the control varies by 30 %.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import document
from fused_norm.chain import normalize
from fused_norm.composition import Operands, Spec
from fused_norm.norms import RMS_NORM
from fused_norm.ops.registration import define_in_python

ROWS = (1, 16, 256)
FEATURES, HIDDEN, BLOCKS = 1024, 2816, 2
EPS = 1e-5


def sum_and_norm(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalized rows of x + residual, and the sum."""
    found = normalize.forward(Spec(RMS_NORM, eps=EPS), Operands(x, residual, gamma))
    return found.z, found.sum


define_in_python(
    "measured_sum_and_norm(Tensor x, Tensor residual, Tensor gamma) -> (Tensor, Tensor)",
    sum_and_norm,
    lambda x, residual, gamma: (torch.empty_like(x), torch.empty_like(x)),
)


class Norm(nn.Module):
    """A sum and LLaMA's RMSNorm, as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(FEATURES) + 0.5)
        self.is_ours = False

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized rows of the sum, and the sum."""
        if self.is_ours:
            z, total = torch.ops.fused_norm.measured_sum_and_norm(x, residual, self.weight)
            return z, total
        total = x + residual
        rows = total.to(torch.promote_types(total.dtype, torch.float32))
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * rows.to(total.dtype), total


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(2))
        self.qkvo = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(FEATURES, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the next norm adds."""
        z, total = self.norms[0](x, residual)
        q, k, v = (layer(z).unflatten(-1, (-1, 64)).transpose(1, 2) for layer in self.qkvo[:3])
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z, total = self.norms[1](self.qkvo[3](heads.transpose(1, 2).flatten(-2)), total)
        return self.down(F.silu(self.gate(z)) * self.up(z)), total


class Model(nn.Module):
    """Blocks, in which the norms add the residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the last sum."""
        for block in self.blocks:
            x, residual = block(x, residual)
        return x + residual


def check(x: Tensor, residual: Tensor, norm: Norm) -> None:
    """Compare a pass with float64.

    Raises:
        RuntimeError: If its error is more than twice that of PyTorch's ops.
    """
    exact = copy.deepcopy(norm).double()(x.double(), residual.double())[0]
    errors = []
    for is_ours in (False, True):
        norm.is_ours = is_ours
        errors.append((norm(x, residual)[0].double() - exact).abs().max().item())
    norm.is_ours = False
    if errors[1] > 2 * errors[0]:
        raise RuntimeError(f"the error of our pass is {errors[1]}, PyTorch's {errors[0]}")


def measure(dtype: torch.dtype, rows: int, then: str, rounds: int) -> dict[str, float]:
    """Return the model's time in seconds, and the control's and ours relative to it."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Model().to(dtype).eval()
    x, residual = torch.randn(2, 1, rows, FEATURES).to(dtype)
    check(x, residual, next(m for m in model.modules() if isinstance(m, Norm)))
    quantization = import_module("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    # They share weights: the memory of a copy changes the time of its products.
    memo = {id(p): p for p in model.parameters()}
    models = {"model": model}
    for name in ("control", "ours"):
        models[name] = copy.deepcopy(model, dict(memo))
    for module in models["ours"].modules():
        if isinstance(module, Norm):
            module.is_ours = True
    compiled = {name: torch.compile(each, backend=then) for name, each in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    # The first rounds compile, and warm up.
    for _ in range(rounds + 3):
        for name, run in compiled.items():
            start = time.perf_counter()
            run(x, residual)
            seconds[name].append(time.perf_counter() - start)
    kept = {name: each[3:] for name, each in seconds.items()}
    found = {"seconds": statistics.median(kept["model"])}
    for name in ("control", "ours"):
        pairs = zip(kept[name], kept["model"], strict=True)
        found[name] = statistics.median(a / b for a, b in pairs)
    return found


def main() -> None:
    """Measure all cases, print them, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    head = document.new(torch.device("cpu"), options.commit, "torch", "torchao")
    cases = head["cases"]
    every = itertools.product((torch.float32, torch.bfloat16), ROWS, ("inductor", "eager"))
    with torch.no_grad():
        for dtype, rows, then in every:
            found = measure(dtype, rows, then, options.rounds)
            cases.append({"dtype": str(dtype).removeprefix("torch."), "rows": rows, "then": then})
            cases[-1].update(found)
            print(*cases[-1].values(), flush=True)
            document.write(head, options.json)


if __name__ == "__main__":
    main()
