"""What the drivers in `solutions/` share: how they compare, time and print."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

ITERATIONS = 50
WARM_UP = 3
LONGEST = 4.0  # seconds of one measurement
TURNS = 9
TOLERANCE = 1e-4  # of the largest reference value, or of 1 if that is smaller


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say on stderr what is being compiled and for how long; the results keep stdout."""
    console = Console(stderr=True)
    text = f"Compiling {what} (kept for the next run)"
    start = time.perf_counter()
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(text, total=None)
            yield
    else:
        print(f"{text} ...", file=sys.stderr, flush=True)
        yield
        print(f"  {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def compare(actual: Tensor, expected: Tensor) -> tuple[float, bool]:
    """Return the largest difference, and whether it is within the tolerance."""
    difference = (actual.double().cpu() - expected.cpu()).abs().max().item()
    # False for NaN too.
    return difference, difference <= TOLERANCE * max(1.0, expected.abs().max().item())


def differentiate(
    forward: Callable[[list[Tensor]], Tensor], data: list[Tensor], grad_output: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the gradients of all the tensors."""
    leaves = [tensor.clone().requires_grad_() for tensor in data]
    output = forward(leaves)
    return output.detach(), list(torch.autograd.grad(output, leaves, grad_output))


def on_gpu(tensors: list[Tensor]) -> list[Tensor] | None:
    """Return copies on the GPU, or None without one."""
    return [tensor.cuda() for tensor in tensors] if torch.cuda.is_available() else None


def measure(compute: Callable[[], Tensor], iterations: int = ITERATIONS) -> float:
    """Return the seconds that all iterations take together."""
    for _ in range(min(WARM_UP, iterations)):
        output = compute()
    if output.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(iterations):
        output = compute()
    if output.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def fitting(compute: Callable[[], Tensor], seconds: float = LONGEST) -> int:
    """Return how many iterations fit into some seconds, at most as many as the document's."""
    once = measure(compute, 1)
    return max(1, min(ITERATIONS, int(seconds / max(once, 1e-9))))


def measure_in_turns(computations: Sequence[Callable[[], Tensor]], iterations: int) -> list[float]:
    """Return the median seconds of one call of each, alternating on the same machine."""
    turns = [[measure(compute, iterations) for compute in computations] for _ in range(TURNS)]
    return [statistics.median(found) / iterations for found in zip(*turns, strict=True)]


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def versus(seconds: float, base: float) -> str:
    """Return how many times faster or slower one time is than another."""
    word = "faster" if seconds < base else "slower"
    return f"{max(seconds, base) / min(seconds, base):.2f}x {word}"


def verdict(correct: bool | None) -> str:
    """Return the word for a correct part, a wrong one, and one that did not run."""
    if correct is None:
        return "SKIPPED (no GPU)"
    return "OK CORRECT" if correct else "INCORRECT"


def report_difference(actual: Tensor, expected: Tensor) -> bool:
    """Print how far a result is off, and return whether it is correct."""
    difference, correct = compare(actual, expected)
    print(f"   Max difference: {difference:.2e}")
    print(f"   Result: {verdict(correct)}")
    return correct


def report_gradients(
    names: Sequence[str], computed: Sequence[Tensor], expected: Sequence[Tensor]
) -> bool:
    """Print how far each gradient is off, and return whether all are correct."""
    all_correct = True
    for name, actual, exact in zip(names, computed, expected, strict=True):
        difference, correct = compare(actual, exact)
        print(f"   {name}: {difference:.2e} {'OK' if correct else 'INCORRECT'}")
        all_correct = all_correct and correct
    return all_correct


def summarize(verdicts: dict[str, bool | None], label: str) -> bool:
    """Print a line for each part and one for all, and return whether all that ran was correct."""
    for name, correct in verdicts.items():
        print(f"   - {name:<14}{verdict(correct)}")
    all_correct = all(correct is not False for correct in verdicts.values())
    print(f"\n   {label} {'OK ALL CORRECT' if all_correct else 'SOME INCORRECT'}")
    return all_correct


def heading(*lines: str) -> None:
    """Print lines between rules."""
    print("=" * 60)
    print("\n".join(lines))
    print("=" * 60)


def title(text: str) -> None:
    """Print a line, underlined."""
    print(f"\n{text}")
    print("-" * (len(text) + 7))
