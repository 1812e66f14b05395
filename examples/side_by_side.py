"""What the examples share: a block in plain PyTorch and on fused_norm, checked and timed together.

python examples/minigpt_block.py            on the CPU and, if there is one, the GPU
python examples/minigpt_block.py --quick    small shapes, in seconds
python examples/trimul.py --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import duration
from benchmarks.timing import Budget, CpuTimer, GpuTimer, Rounds, Timer


@dataclass
class Block:
    """One block at one shape, in several versions of which the first is the reference.

    Attributes:
        name: What the table calls the shape.
        inputs: What every version is called with; x, the first, gets a gradient.
        versions: By name. All of them compute with the same parameters.
        parameters: Those.
        tolerance: Absolute and relative, of each element.
        times: Microseconds by name of a version, for forward and training, once measured.
    """

    name: str
    inputs: Sequence[Tensor]
    versions: dict[str, Callable[..., Tensor]]
    parameters: Sequence[Tensor]
    tolerance: float
    times: dict[str, dict[str, float]] = field(default_factory=dict)


Make = Callable[[torch.device, bool], Sequence[Callable[[], Block]]]


def main(title: str, make: Make, arguments: Sequence[str] | None = None) -> int:
    """Check and time blocks and return an exit status: 1 if a version is wrong.

    Args:
        title: Of the table.
        make: Returns makers of blocks for a device, small ones if asked to.
        arguments: Of the command line.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: both, where there are")
    parser.add_argument("--quick", action="store_true", help="small shapes, short timing")
    options = parser.parse_args(arguments)
    console = Console()
    wrong = []
    for name in [options.device] if options.device else ["cpu", "cuda"]:
        if name == "cuda" and not torch.cuda.is_available():
            console.print("cuda: SKIPPED, PyTorch sees no GPU")
            continue
        device = torch.device(name)
        table = Table(title=f"{title}, {name}", title_justify="left", header_style="dim")
        table.add_column("shape")
        table.add_column("version")
        for column in ("forward", "vs first", "training", "vs first"):
            table.add_column(column, justify="right")
        for made in make(device, options.quick):
            # One at a time: the largest fill a GPU.
            block = made()
            problems = check(block)
            wrong += problems
            if not problems:
                measure(block, device, Budget(0.1 if options.quick else 1.0, 0.1, 3))
                _add(table, block)
        console.print(table)
    for problem in wrong:
        console.print(f"WRONG: {problem}", style="red")
    return 1 if wrong else 0


def check(block: Block) -> list[str]:
    """Return what differs from the reference by more than the tolerance.

    Args:
        block: The block.
    """
    problems = []
    with torch.no_grad():
        expected, *others = (version(*block.inputs) for version in block.versions.values())
    for name, y in zip(list(block.versions)[1:], others, strict=True):
        if not torch.allclose(y, expected, rtol=block.tolerance, atol=block.tolerance):
            error = float((y - expected).abs().max())
            problems.append(f"{name} at {block.name}: off by up to {error:.2g}")
    return problems


def measure(block: Block, device: torch.device, budget: Budget) -> None:
    """Time all versions in interleaved rounds, forward and training, into `times`.

    Args:
        block: The block.
        device: Where its tensors are.
        budget: How long.
    """
    x = block.inputs[0].requires_grad_()
    leaves = [x, *block.parameters]
    with torch.no_grad():
        block.times["forward"] = _medians(
            {name: partial(call, *block.inputs) for name, call in block.versions.items()},
            device,
            budget,
        )
        gradient = torch.randn_like(next(iter(block.versions.values()))(*block.inputs))

    def train(call: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(call(*block.inputs), leaves, gradient)

    steps = {name: partial(train, call) for name, call in block.versions.items()}
    block.times["training"] = _medians(steps, device, budget)


def _medians(
    steps: Mapping[str, Callable[[], object]], device: torch.device, budget: Budget
) -> dict[str, float]:
    """Return microseconds by name: on a GPU the time of replays of a CUDA graph."""
    timers: dict[str, Timer] = {}
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for name, step in steps.items():
        timers[name] = CpuTimer([step]) if stream is None else GpuTimer([step], stream)
    rounds = Rounds(timers, budget, seed=0)
    rounds.run()
    for error in rounds.failures.values():
        raise error
    found = {name: rounds.timings(name) for name in steps}
    metric = next(m for m in ("graph", "launch", "wall") if all(m in t for t in found.values()))
    return {name: timings[metric].median for name, timings in found.items()}


def _add(table: Table, block: Block) -> None:
    first = next(iter(block.versions))
    for name in block.versions:
        cells = []
        for times in block.times.values():
            cells += [duration(times[name]), f"{times[name] / times[first]:.2f}"]
        table.add_row(block.name if name == first else "", name, *cells)
    table.add_section()
