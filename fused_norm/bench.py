"""A small check of this machine: our calls against PyTorch eager's, forward and training step.

Each call's output and gradients are first compared with float64; one that is off by more than
`WORST` times eager's own error is reported and not timed. Ours and eager are then interleaved in
random order, so that both see the same machine, and medians are compared. The harness that compares
with other libraries is in the repository, under `benchmarks/`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from torch import Tensor

import fused_norm as fn
from fused_norm.parser import Parser

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = {
    "cpu": [(1, 768, 3072), (128, 768, 3072), (1024, 1024, 1024)],
    "cuda": [(16, 1024, 4096), (2048, 1024, 4096), (8192, 4096, 4096)],
}
# The largest error of a result, as a multiple of eager's own, and in roundings of the dtype.
WORST = 3.0
ROUNDINGS = 2.0
ROUNDS = 9
# A sample of this many seconds hides the clock's overhead, and lets a GPU's launches overlap.
SAMPLE = 2e-3
WIDTH = 80
UNITS = {"s": 1, "ms": 1e-3, "us": 1e-6}

Step = Callable[[], object]


@dataclass(frozen=True)
class Op:
    """A call and its composition in PyTorch, on x, the weight, its bias and gamma.

    Attributes:
        name: What the table calls it.
        gated: Whether the weight has two rows for each output.
        ours: Our call.
        eager: PyTorch's ops.
    """

    name: str
    gated: bool
    ours: Callable[..., Tensor]
    eager: Callable[..., Tensor]


def _layer_norm_linear(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma), weight, bias)


def _rms_norm_swiglu(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor) -> Tensor:
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], gamma, 1e-5), weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def _our_layer_norm_linear(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor) -> Tensor:
    y: Tensor = fn.norm_linear(x, weight, bias, norm_weight=gamma)
    return y


def _our_rms_norm_swiglu(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor) -> Tensor:
    options: dict[str, Any] = {"normalization": "rms_norm", "activation": "swiglu"}
    y: Tensor = fn.norm_linear(x, weight, bias, norm_weight=gamma, **options)
    return y


OPS = [
    Op("LayerNorm + Linear", False, _our_layer_norm_linear, _layer_norm_linear),
    Op("RMSNorm + SwiGLU", True, _our_rms_norm_swiglu, _rms_norm_swiglu),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table.

    Returns:
        0 if all of our results were right, and within `--max-ratio`; 1 if not; 2 for a wrong
        command line.
    """
    parser = Parser(
        prog="python -m fused_norm bench", description="Compare a few calls with PyTorch eager."
    )
    parser.add_argument("--device", choices=list(SHAPES), help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="may be repeated")
    parser.add_argument("--shape", metavar="M,K,N", action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument(
        "--max-ratio", type=float, metavar="R", help="exit 1 if ours exceeds R times eager's time"
    )
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU")
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if options.max_ratio is not None and not options.max_ratio >= 0:
        parser.error("--max-ratio must be 0 or more")
    try:
        shapes = [_shape(text) for text in options.shape or ()] or SHAPES[device]
    except ValueError as error:
        parser.error(str(error))
    console = Console(width=WIDTH)
    console.print(_machine(device), highlight=False)
    # Not drawn by a thread, which would take time from what is measured.
    column, terminal = TextColumn("{task.description}"), Console(stderr=True)
    with Progress(column, console=terminal, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("")

        def say(text: str) -> None:
            progress.update(task, description=text, refresh=True)

        table, problems = _measured(device, options, shapes, say)
    console.print(table)
    for problem in problems:
        console.print(problem, style="red", highlight=False, markup=False, soft_wrap=True)
    return 1 if problems else 0


def _measured(
    device: str,
    options: argparse.Namespace,
    shapes: Sequence[tuple[int, int, int]],
    say: Callable[[str], None],
) -> tuple[Table, list[str]]:
    table = Table(
        box=None, pad_edge=False, caption="medians; ratios are to eager, below 1 is faster"
    )
    for header in ("op", "dtype", "M, K, N"):
        table.add_column(header, no_wrap=True)
    for mode in ("forward", "training"):
        table.add_column(mode, justify="right")
        table.add_column("ratio", justify="right")
    problems = []
    for op in OPS:
        for name in options.dtype or (["bfloat16"] if device == "cuda" else ["float32"]):
            for shape in shapes:
                row = [op.name, name, ", ".join(map(str, shape))]
                inputs = _inputs(op, shape, DTYPES[name], device)
                where = f"{op.name}, {name}, {row[-1]}"
                say(f"Checking and timing {where}")
                if wrong := _wrong(op, inputs):
                    problems.append(f"{where}: {wrong}")
                    table.add_row(*row, "wrong")
                    continue
                for mode, step in (("forward", _forward), ("training", _training)):
                    ours, eager = _times(step(op.ours, inputs), step(op.eager, inputs), options)
                    row += [_words(ours), _ratio(ours / eager)]
                    if options.max_ratio is not None and ours / eager > options.max_ratio:
                        problems.append(
                            f"{where}, {mode}: {ours / eager:.2f} of eager's time, "
                            f"over {options.max_ratio}"
                        )
                table.add_row(*row)
    return table, problems


def _shape(text: str) -> tuple[int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.strip().isdigit() and int(size) for size in sizes):
        raise ValueError(f"--shape takes M,K,N, got {text}")
    m, k, n = map(int, sizes)
    return m, k, n


def _inputs(op: Op, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    m, k, n = shape
    outputs = 2 * n if op.gated else n
    generator = torch.Generator().manual_seed(0)

    def values(*sizes: int, scale: float = 1.0, center: float = 0.0) -> Tensor:
        found = torch.randn(sizes, generator=generator) * scale + center
        return found.to(device, dtype).requires_grad_()

    return [
        values(m, k),
        values(outputs, k, scale=k**-0.5),
        values(outputs),
        values(k, scale=0.1, center=1.0),
    ]


def _results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and all gradients, for an output gradient of ones."""
    output = function(*inputs)
    return [output, *torch.autograd.grad(output, inputs, torch.ones_like(output))]


def _wrong(op: Op, inputs: Sequence[Tensor]) -> str:
    """Return what is wrong with our results, or an empty string."""
    exact = _results(op.eager, [t.detach().double().requires_grad_() for t in inputs])
    eager, ours = _results(op.eager, inputs), _results(op.ours, inputs)
    names = ("y", "dx", "dweight", "dbias", "dgamma")
    for name, truth, peer, value in zip(names, exact, eager, ours, strict=True):
        size = truth.norm().item()
        allowed = WORST * (peer - truth).norm().item()
        allowed += ROUNDINGS * torch.finfo(value.dtype).eps * size
        error = (value - truth).norm().item()
        # False for NaN too.
        if not error <= allowed:
            return f"{name} is off by {error / size:.1e} of its size"
    return ""


def _forward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Step:
    def step() -> None:
        with torch.no_grad():
            function(*inputs)

    return step


def _training(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Step:
    gradient = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def _times(ours: Step, eager: Step, options: argparse.Namespace) -> tuple[float, float]:
    """Return the median seconds of a call of each, in interleaved rounds."""
    steps = {"ours": ours, "eager": eager}
    # The first call loads kernels and plans.
    for step in steps.values():
        _sample(step, 1)
    calls = {name: max(1, round(SAMPLE / _sample(step, 2))) for name, step in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(list(steps), len(steps)):
            found[name].append(_sample(steps[name], calls[name]))
    return statistics.median(found["ours"]), statistics.median(found["eager"])


def _sample(step: Step, calls: int) -> float:
    """Return the seconds of a call."""
    _wait()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    _wait()
    return (time.perf_counter() - start) / calls


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _words(seconds: float) -> str:
    # Three digits, so that slow calls fit the columns, too.
    unit, scale = next(each for each in UNITS.items() if seconds >= each[1] or each[0] == "us")
    number = seconds / scale
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"


def _ratio(value: float) -> str:
    # An interrupted sample may be a thousand times longer, and no time is 0.
    return f"{value:.2f}" if value >= 0.01 else f"{value:.0e}"


def _machine(device: str) -> str:
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    return f"fused_norm {fn.__version__}, torch {torch.__version__}, {device}: {name}"
