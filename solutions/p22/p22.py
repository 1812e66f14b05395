"""Puzzle 22: LayerNorm and Linear fused, forward and backward, checked and timed.

    uv run poe p22 --fused | --unfused | --backward [--problem] [--batch 4 --seq 4 ...]

``--problem`` runs your kernels in ``problems/p22/op`` and not the finished ones of ``op/puzzle``.
The exit status is 0 only if everything that ran was correct; without a GPU its parts are SKIPPED.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from fused_norm import _max, reference

ITERATIONS = 50
WARM_UP = 3
TOLERANCE = 1e-4  # of the largest reference value, or of 1 if that is smaller
PROBLEM = Path(__file__).parents[2] / "problems" / "p22" / "op"
GRADIENTS = (
    "grad_input",
    "grad_ln_weight",
    "grad_ln_bias",
    "grad_linear_weight",
    "grad_linear_bias",
)


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments ask for and return the exit status."""
    args = _arguments(argv)
    data = make_data(args.sizes, args.seed)
    print(f"Testing with dimensions: {_dimensions(args.sizes)}")
    try:
        with compiling("Mojo operations library"):
            _max.library(PROBLEM if args.problem else None)
        print("OK Loaded Mojo operations library")
        if args.mode == "backward":
            correct = run_backward(data, args.sizes, args.seed)
        else:
            correct = run_forward(args.mode, data)
    except _max.CompileError as error:
        print(f"The kernels do not compile: {error}", file=sys.stderr)
        return 1
    return 0 if correct else 1


def make_data(sizes: _max.Sizes, seed: int) -> list[Tensor]:
    """Return x and the four parameters, random so that none of them could be left out unseen."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * std + mean

    return [
        normal(sizes.batch_size, sizes.seq_len, sizes.hidden_dim),
        normal(sizes.hidden_dim, mean=1.0, std=0.2),
        normal(sizes.hidden_dim, std=0.2),
        normal(sizes.output_dim, sizes.hidden_dim, std=sizes.hidden_dim**-0.5),
        normal(sizes.output_dim, std=0.2),
    ]


def run_forward(algorithm: _max.Algorithm, data: list[Tensor]) -> bool:
    """Check one forward algorithm on each device, then time it."""
    name = algorithm.upper()
    _heading(f"   Puzzle 22: {name} Algorithm Test & Benchmark")
    print(f"\nCorrectness Testing for {name} Algorithm")
    print("=" * (45 + len(algorithm)))
    expected = reference.layernorm_linear(*(tensor.double() for tensor in data))

    verdicts: dict[str, bool | None] = {}
    _title("Testing Reference PyTorch Implementation")
    print("OK Reference PyTorch")
    verdicts["Reference:"] = _report_difference(_pytorch(data), expected)

    _title("Testing CPU Implementation")
    # The CPU has one implementation, which is fused.
    with compiling("fused kernel for the CPU"):
        output = _max.layernorm_linear(*data, algorithm="fused")
    print("OK Using Mojo fused kernel (CPU)")
    verdicts["CPU:"] = _report_difference(output, expected)

    gpu_data = _on_gpu(data)
    _title(f"Testing GPU {algorithm.title()} Implementation")
    if gpu_data is None:
        print("   Result: SKIPPED (no GPU)")
        verdicts[f"GPU {algorithm}:"] = None
    else:
        with compiling(f"{algorithm} kernel for the GPU"):
            output = _max.layernorm_linear(*gpu_data, algorithm=algorithm)
        print(f"OK Using Mojo {algorithm} kernel (GPU)")
        verdicts[f"GPU {algorithm}:"] = _report_difference(output, expected)

    print("\nCorrectness Summary:")
    correct = _summarize(verdicts, "Overall Correctness:")
    if not correct:
        print("\nNo benchmark of incorrect kernels")
        return False
    benchmark(algorithm, data, gpu_data)
    print(f"\n{name} Algorithm Test Completed!")
    return True


def run_backward(data: list[Tensor], sizes: _max.Sizes, seed: int) -> bool:
    """Check the gradients on each device, for a random incoming gradient and for ones."""
    _heading(
        "           Comprehensive Backward Pass Test",
        "           Testing Custom LayerNorm + Linear Gradients",
    )
    print(f"Testing with dimensions: {_dimensions(sizes)}")
    generator = torch.Generator().manual_seed(seed + 1)
    grad_output = torch.randn(
        sizes.batch_size, sizes.seq_len, sizes.output_dim, generator=generator
    )

    verdicts: dict[str, bool | None] = {}
    print("\nTesting CPU Backward Pass:")
    verdicts["CPU Backward:"] = _check_backward("CPU", data, grad_output)
    print("\nTesting GPU Backward Pass:")
    gpu_data = _on_gpu([*data, grad_output])
    if gpu_data is None:
        print("   Result: SKIPPED (no GPU)")
        verdicts["GPU Backward:"] = None
    else:
        verdicts["GPU Backward:"] = _check_backward("GPU", gpu_data[:-1], gpu_data[-1])

    print("\nBackward Pass Test Summary:")
    correct = _summarize(verdicts, "Overall Result:")
    print("\nBACKWARD PASS Test Completed!")
    return correct


def _check_backward(device: str, data: list[Tensor], grad_output: Tensor) -> bool:
    """Compare the gradients of the Mojo kernels with those of PyTorch's autograd in float64."""
    _title(f"Testing {device} Backward Implementation - Backward Pass")
    print("   Computing PyTorch autograd reference...")
    ones = torch.ones_like(grad_output)
    exact = [tensor.double() for tensor in data]
    expected, gradients = _differentiate(_pytorch, exact, grad_output.double())
    _, gradients_of_ones = _differentiate(_pytorch, exact, ones.double())

    print(f"   Computing Mojo backward implementation ({device})...")

    def fused(tensors: list[Tensor]) -> Tensor:
        output: Tensor = _max.LayerNormLinearFunction.apply(*tensors, "fused")
        return output

    with compiling(f"fused forward and backward kernels for the {device}"):
        output, computed = _differentiate(fused, data, grad_output)
    _, computed_of_ones = _differentiate(fused, data, ones)
    print(f"OK {device} Backward Implementation backward completed")

    difference, forward_correct = compare(output, expected)
    print(f"   Forward max difference: {difference:.2e}")
    correct = _report_gradients(computed, gradients)
    print("   With a grad_output of ones:")
    correct = _report_gradients(computed_of_ones, gradients_of_ones) and correct

    print(f"\n   Forward pass: {_verdict(forward_correct)}")
    print(f"   Gradients:    {_verdict(correct)}")
    print(f"   Overall:      {_verdict(forward_correct and correct)}")
    return forward_correct and correct


def benchmark(algorithm: _max.Algorithm, data: list[Tensor], gpu_data: list[Tensor] | None) -> None:
    """Time the CPU against the GPU or, without one, Mojo against PyTorch."""

    def mojo_cpu() -> Tensor:
        return _max.layernorm_linear(*data, algorithm="fused")

    if gpu_data is None:
        _title(f"Benchmarking Mojo CPU vs PyTorch CPU {algorithm.upper()}")
        contenders = ("PyTorch CPU", lambda: _pytorch(data)), ("Mojo CPU", mojo_cpu)
    else:
        _title(f"Benchmarking CPU vs GPU {algorithm.upper()}")
        on_gpu = gpu_data
        contenders = (
            ("CPU", mojo_cpu),
            (f"GPU {algorithm}", lambda: _max.layernorm_linear(*on_gpu, algorithm=algorithm)),
        )
    seconds = {}
    for name, compute in contenders:
        print(f"   Testing {name} performance...")
        seconds[name] = _time(compute)
        print(f"   {name}: {seconds[name] * 1e3:.2f}ms ({ITERATIONS} iterations)")

    (first, base), (second, other) = seconds.items()
    word = "faster" if other < base else "slower"
    print(f"\n   {second} vs {first}: {max(base, other) / min(base, other):.2f}x {word}")
    if other < base:
        print(f"   {second} wins!")
    else:
        print(f"   {first} wins (at this size a call costs more than its computation)")


def compare(actual: Tensor, expected: Tensor) -> tuple[float, bool]:
    """Return the largest difference, and whether it is within the tolerance."""
    difference = (actual.double().cpu() - expected.cpu()).abs().max().item()
    # False for NaN too.
    return difference, difference <= TOLERANCE * max(1.0, expected.abs().max().item())


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


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="p22", description="Puzzle 22: LayerNorm + Linear, fused")
    modes = parser.add_mutually_exclusive_group(required=True)
    for mode, text in (
        ("fused", "one kernel for both"),
        ("unfused", "LayerNorm, transpose, matmul and bias after each other"),
        ("backward", "the gradients"),
    ):
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=text)
    parser.add_argument("--problem", action="store_true", help="run your kernels of problems/p22")
    parser.add_argument("--batch", type=int, default=4, help="sequences (4)")
    parser.add_argument("--seq", type=int, default=4, help="positions in a sequence (4)")
    parser.add_argument("--hidden", type=int, default=8, help="elements of a position (8)")
    parser.add_argument("--output", type=int, default=16, help="outputs of a position (16)")
    parser.add_argument("--seed", type=int, default=42, help="of the random data (42)")
    args = parser.parse_args(argv)
    args.sizes = _max.Sizes(args.batch, args.seq, args.hidden, args.output)
    try:
        args.sizes.check()
    except ValueError as error:
        parser.error(str(error))
    return args


def _pytorch(tensors: list[Tensor]) -> Tensor:
    x, ln_weight, ln_bias, linear_weight, linear_bias = tensors
    normed = F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias)
    return F.linear(normed, linear_weight, linear_bias)


def _differentiate(
    forward: Callable[[list[Tensor]], Tensor], data: list[Tensor], grad_output: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the gradients of all the tensors."""
    leaves = [tensor.clone().requires_grad_() for tensor in data]
    output = forward(leaves)
    return output.detach(), list(torch.autograd.grad(output, leaves, grad_output))


def _on_gpu(tensors: list[Tensor]) -> list[Tensor] | None:
    return [tensor.cuda() for tensor in tensors] if torch.cuda.is_available() else None


def _time(compute: Callable[[], Tensor]) -> float:
    """Return the seconds that all iterations take together."""
    for _ in range(WARM_UP):
        output = compute()
    if output.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(ITERATIONS):
        output = compute()
    if output.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _dimensions(sizes: _max.Sizes) -> str:
    rows = [sizes.batch_size, sizes.seq_len]
    return f"{[*rows, sizes.hidden_dim]} -> {[*rows, sizes.output_dim]}"


def _verdict(correct: bool | None) -> str:
    if correct is None:
        return "SKIPPED (no GPU)"
    return "OK CORRECT" if correct else "INCORRECT"


def _report_difference(actual: Tensor, expected: Tensor) -> bool:
    difference, correct = compare(actual, expected)
    print(f"   Max difference: {difference:.2e}")
    print(f"   Result: {_verdict(correct)}")
    return correct


def _report_gradients(computed: list[Tensor], expected: list[Tensor]) -> bool:
    all_correct = True
    for name, actual, exact in zip(GRADIENTS, computed, expected, strict=True):
        difference, correct = compare(actual, exact)
        print(f"   {name}: {difference:.2e} {'OK' if correct else 'INCORRECT'}")
        all_correct = all_correct and correct
    return all_correct


def _summarize(verdicts: dict[str, bool | None], label: str) -> bool:
    """Print a line for each part and one for all, and return whether all that ran was correct."""
    for name, verdict in verdicts.items():
        print(f"   - {name:<14}{_verdict(verdict)}")
    correct = all(verdict is not False for verdict in verdicts.values())
    print(f"\n   {label} {'OK ALL CORRECT' if correct else 'SOME INCORRECT'}")
    return correct


def _heading(*lines: str) -> None:
    print("=" * 60)
    print("\n".join(lines))
    print("=" * 60)


def _title(text: str) -> None:
    print(f"\n{text}")
    print("-" * (len(text) + 7))


if __name__ == "__main__":
    sys.exit(main())
