"""Decoding: one token of each sequence through blocks of LLaMA-8B, on a GPU.

    poe bench --decode [--batch 1 --batch 16] [--json FILE] [--profile DIRECTORY]

Eight blocks with a cache of 1024 positions, all of them in use; a step writes its keys and values
into the last one. Times are of CUDA graphs, interleaved, in a new random order in each round.
`products` are the products alone, by PyTorch; `weights` is the time that the bytes of the weights
take at the speed of a large copy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from benchmarks import document
from benchmarks.case import EPS
from benchmarks.timing import Budget, GpuTimer, Rounds
from fused_norm import frozen_parameters
from fused_norm.models import backend

BLOCKS, WIDTH, HIDDEN, HEADS, SHARED, HEAD, CACHE = 8, 4096, 14336, 32, 8, 128, 1024
BATCHES = (1, 16, 64)
# Elements of the copy whose speed counts, of two bytes.
COPIED = 128 << 20
Formula = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A block as transformers has it, and its cache."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, EPS), nn.RMSNorm(WIDTH, EPS)
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, SHARED * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(batch, SHARED, CACHE, HEAD))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        """Return `[batch, 1, WIDTH]`, and write keys and values at a position."""
        z = self.norm1(x)
        batch = x.shape[0]
        query = _turned(self.q(z).view(batch, 1, HEADS, HEAD).transpose(1, 2), cos, sin)
        key = _turned(self.k(z).view(batch, 1, SHARED, HEAD).transpose(1, 2), cos, sin)
        value = self.v(z).view(batch, 1, SHARED, HEAD).transpose(1, 2)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        y = F.scaled_dot_product_attention(query, self.keys, self.values, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, 1, WIDTH))
        z = self.norm2(x)
        total: Tensor = x + self.down(F.silu(self.gate(z)) * self.up(z))
        return total


class Model(nn.Module):
    """Blocks, and what a step gives them."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(batch) for _ in range(BLOCKS))
        angles = torch.randn(1, 1, HEAD // 2).repeat(1, 1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("position", torch.tensor([CACHE - 1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return what a step makes of the rows `[batch, 1, WIDTH]`."""
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.position)
        return x

    def products(self, x: Tensor) -> Tensor:
        """Return what the products alone give of some rows."""
        each: Any = self.blocks
        for block in each:
            for layer in (block.q, block.k, block.v, block.out, block.gate, block.up):
                y = layer(x)
            x = x + block.down(y)
        return x


class Provider(NamedTuple):
    """Someone who computes a step.

    Attributes:
        formula: Computes it.
        capture: Makes the context that its calls are captured in.
    """

    formula: Formula
    capture: Callable[[], AbstractContextManager[Any]] = nullcontext


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def providers(model: Model) -> dict[str, Provider]:
    """Return who computes a step, eager first."""
    ours = {"small": True}
    eight: dict[str, Any] = {"small": True, "fp8": "rowwise"}

    def by_us(options: dict[str, Any]) -> Formula:
        found: Formula = torch.compile(model, backend=backend, options=options, dynamic=False)
        return found

    return {
        "eager": Provider(model),
        "compile": Provider(torch.compile(model, dynamic=False)),
        "products": Provider(model.products),
        "fused_norm": Provider(by_us(ours)),
        "fused_norm, eager": Provider(by_us({"small": True, "then": "eager"})),
        "fused_norm, frozen": Provider(by_us(ours), frozen_parameters),
        "fused_norm FP8, frozen": Provider(by_us(eight), frozen_parameters),
    }


def measure(batch: int, seconds: float, device: torch.device, profiles: Path | None) -> Any:
    """Return microseconds of a step by each provider, and how far its result is off."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(batch).bfloat16().eval().requires_grad_(False)
        x = torch.randn(batch, 1, WIDTH, dtype=torch.bfloat16)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    stream, timers, found = torch.cuda.Stream(), {}, dict[str, Any]()
    with torch.no_grad():
        expected = model(x)
        for name, provider in providers(model).items():

            def step(formula: Formula = provider.formula) -> Tensor:
                return formula(x)

            try:
                with torch.cuda.stream(stream):
                    y = step()
                torch.cuda.synchronize()
            except Exception as error:
                # A provider that fails is reported, and the others go on.
                found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            off = (y - expected).float().norm() / expected.float().norm()
            found[name] = {"off": round(off.item(), 4)}
            timers[name] = GpuTimer([step], stream, provider.capture)
        rounds = Rounds(dict(timers), Budget(seconds, seconds / 2, fewest=9), 0)
        rounds.run()
        if profiles is not None:
            _profile(timers, profiles / f"decode-{batch}.txt")
    for name, timer in timers.items():
        if timings := rounds.timings(name).get("graph"):
            found[name] |= {"us": round(timings.median, 1), "rounds": timings.rounds}
        else:
            found[name] |= {"error": str(rounds.failures.get(name) or timer.problem)[:300]}
    size = sum(p.numel() * p.element_size() for p in matrices)
    found["weights"] = {"us": round(size / _bytes_a_microsecond(device), 1)}
    return {"batch": batch, "results": found}


def _profile(timers: dict[str, GpuTimer], path: Path) -> None:
    """Write the kernels of each provider's graph, and their microseconds a step."""
    lines = []
    for name, timer in timers.items():
        if timer.graph is None:
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as log:
            for _ in range(5):
                timer.graph.replay()
            torch.cuda.synchronize()
        steps = 5 * timer.calls_in_graph
        lines.append(name)
        for each in sorted(log.key_averages(), key=lambda e: -e.self_device_time_total):
            took, count = each.self_device_time_total / steps, each.count / steps
            lines.append(f"  {took:8.1f} us {count:6.1f} x {each.key[:150]}")
    path.write_text("\n".join(lines) + "\n")


def _bytes_a_microsecond(device: torch.device) -> float:
    a = torch.ones(COPIED, dtype=torch.bfloat16, device=device)
    timer = GpuTimer([lambda: a.clone()], torch.cuda.Stream())
    rounds = Rounds({"copy": timer}, Budget(0.2, 0.1, fewest=9), 0)
    rounds.run()
    return 2 * a.nbytes / rounds.timings("copy")["graph"].median


def table(cases: Sequence[dict[str, Any]]) -> Table:
    """Return times over eager's."""
    names = list(dict.fromkeys(name for case in cases for name in case["results"]))
    found = Table(title="Decoding, 8 blocks of LLaMA-8B: time over eager in CUDA graphs")
    found.add_column("")
    for case in cases:
        found.add_column(f"batch {case['batch']}", justify="right")
    for name in names:
        cells = []
        for case in cases:
            result, eager = case["results"].get(name, {}), case["results"]["eager"]["us"]
            cells.append(f"{result['us'] / eager:.3f}" if "us" in result else "-")
        found.add_row(name, *cells)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and return an exit status."""
    parser = argparse.ArgumentParser(prog="poe bench --decode", description=__doc__)
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--batch", action="append", type=int, help="sequences (default: 1, 16, 64)")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each (default: 0.3)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="folder for the kernels of each graph")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("SKIPPED: decoding is measured on GPUs")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    found = document.new(device, options.commit, "torch", "triton")
    for batch in options.batch or BATCHES:
        case = measure(batch, options.seconds, device, options.profile)
        found["cases"].append(case)
        document.show(case, table([case]))
        document.write(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
