"""Puzzle 22: LayerNorm and Linear fused, forward and backward, checked and timed.

    uv run poe p22 --fused | --unfused | --backward [--problem] [--size real]

``--problem`` runs your kernels in ``problems/p22/op`` and not the finished ones of ``op/puzzle``.
The exit status is 0 only if everything that ran was correct; without a GPU its parts are SKIPPED.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # What is imported below takes seconds to load.
    print("Loading PyTorch and MAX ...", file=sys.stderr, flush=True)

import argparse
from dataclasses import astuple
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm import reference
from tutorial.puzzle import max_ops
from tutorial.puzzle.driver import (
    ITERATIONS,
    compare,
    compiling,
    differentiate,
    duration,
    fitting,
    heading,
    measure,
    measure_in_turns,
    on_gpu,
    report_difference,
    report_gradients,
    summarize,
    title,
    verdict,
    versus,
)

SIZES = {
    "document": max_ops.Sizes(batch_size=4, seq_len=4, hidden_dim=8, output_dim=16),
    # The kernels give a thread to each output, of which a block has 1024 at most.
    "real": max_ops.Sizes(batch_size=4, seq_len=128, hidden_dim=768, output_dim=1024),
}
TRANSFORMER = max_ops.Sizes(batch_size=4, seq_len=512, hidden_dim=768, output_dim=3072)
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
            max_ops.library(PROBLEM if args.problem else None)
        print("OK Loaded Mojo operations library")
        if args.mode == "backward":
            correct = run_backward(data, args.sizes, args.seed)
        else:
            correct = run_forward(args.mode, data)
            if args.problem and args.mode == "unfused":
                print("\nYour unfused kernels run on a GPU; the ones that a CPU runs are given.")
            if correct:
                benchmark_library(args.sizes, args.seed, _device())
    except max_ops.CompileError as error:
        print(f"The kernels do not compile: {error}", file=sys.stderr)
        return 1
    return 0 if correct else 1


def make_data(sizes: max_ops.Sizes, seed: int) -> list[Tensor]:
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


def run_forward(algorithm: max_ops.Algorithm, data: list[Tensor]) -> bool:
    """Check one forward algorithm on each device, then time it."""
    name = algorithm.upper()
    heading(f"   Puzzle 22: {name} Algorithm Test & Benchmark")
    print(f"\nCorrectness Testing for {name} Algorithm")
    print("=" * (45 + len(algorithm)))
    expected = reference.layernorm_linear(*(tensor.double() for tensor in data))

    verdicts: dict[str, bool | None] = {}
    title("Testing Reference PyTorch Implementation")
    print("OK Reference PyTorch")
    verdicts["Reference:"] = report_difference(_pytorch(data), expected)

    title("Testing CPU Implementation")
    with compiling(f"{algorithm} kernel for the CPU"):
        output = max_ops.layernorm_linear(*data, algorithm=algorithm)
    print(f"OK Using Mojo {algorithm} kernel (CPU)")
    verdicts["CPU:"] = report_difference(output, expected)

    gpu_data = on_gpu(data)
    title(f"Testing GPU {algorithm.title()} Implementation")
    if gpu_data is None:
        print("   Result: SKIPPED (no GPU)")
        verdicts[f"GPU {algorithm}:"] = None
    else:
        with compiling(f"{algorithm} kernel for the GPU"):
            output = max_ops.layernorm_linear(*gpu_data, algorithm=algorithm)
        print(f"OK Using Mojo {algorithm} kernel (GPU)")
        verdicts[f"GPU {algorithm}:"] = report_difference(output, expected)

    print("\nCorrectness Summary:")
    correct = summarize(verdicts, "Overall Correctness:")
    if not correct:
        print("\nNo benchmark of incorrect kernels")
        return False
    benchmark(algorithm, data, gpu_data)
    print(f"\n{name} Algorithm Test Completed!")
    return True


def run_backward(data: list[Tensor], sizes: max_ops.Sizes, seed: int) -> bool:
    """Check the gradients on each device, for a random incoming gradient and for ones."""
    heading(
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
    gpu_data = on_gpu([*data, grad_output])
    if gpu_data is None:
        print("   Result: SKIPPED (no GPU)")
        verdicts["GPU Backward:"] = None
    else:
        verdicts["GPU Backward:"] = _check_backward("GPU", gpu_data[:-1], gpu_data[-1])

    print("\nBackward Pass Test Summary:")
    correct = summarize(verdicts, "Overall Result:")
    print("\nBACKWARD PASS Test Completed!")
    return correct


def _check_backward(device: str, data: list[Tensor], grad_output: Tensor) -> bool:
    """Compare the gradients of the Mojo kernels with those of PyTorch's autograd in float64."""
    title(f"Testing {device} Backward Implementation - Backward Pass")
    print("   Computing PyTorch autograd reference...")
    ones = torch.ones_like(grad_output)
    exact = [tensor.double() for tensor in data]
    expected, gradients = differentiate(_pytorch, exact, grad_output.double())
    _, gradients_of_ones = differentiate(_pytorch, exact, ones.double())

    print(f"   Computing Mojo backward implementation ({device})...")

    def fused(tensors: list[Tensor]) -> Tensor:
        output: Tensor = max_ops.LayerNormLinearFunction.apply(*tensors, "fused")
        return output

    with compiling(f"forward and backward for the {device}"):
        output, computed = differentiate(fused, data, grad_output)
    _, computed_of_ones = differentiate(fused, data, ones)
    print(f"OK {device} Backward Implementation backward completed")

    difference, forward_correct = compare(output, expected)
    print(f"   Forward max difference: {difference:.2e}")
    correct = report_gradients(GRADIENTS, computed, gradients)
    print("   With a grad_output of ones:")
    correct = report_gradients(GRADIENTS, computed_of_ones, gradients_of_ones) and correct

    print(f"\n   Forward pass: {verdict(forward_correct)}")
    print(f"   Gradients:    {verdict(correct)}")
    print(f"   Overall:      {verdict(forward_correct and correct)}")
    return forward_correct and correct


def benchmark(
    algorithm: max_ops.Algorithm, data: list[Tensor], gpu_data: list[Tensor] | None
) -> None:
    """Time the CPU against the GPU or, without one, Mojo against PyTorch."""

    def mojo_cpu() -> Tensor:
        return max_ops.layernorm_linear(*data, algorithm=algorithm)

    if gpu_data is None:
        title(f"Benchmarking Mojo CPU vs PyTorch CPU {algorithm.upper()}")
        contenders = ("PyTorch CPU", lambda: _pytorch(data)), ("Mojo CPU", mojo_cpu)
    else:
        title(f"Benchmarking CPU vs GPU {algorithm.upper()}")
        tensors = gpu_data
        contenders = (
            ("CPU", mojo_cpu),
            (f"GPU {algorithm}", lambda: max_ops.layernorm_linear(*tensors, algorithm=algorithm)),
        )
    print("   This times the document's kernel, which is meant to be read, not to be fast.")
    print("   Each call also goes through a MAX graph. The library's op is timed below.")
    seconds = {}
    for name, compute in contenders:
        print(f"   Testing {name} performance...", flush=True)
        iterations = fitting(compute)
        seconds[name] = measure(compute, iterations) / iterations * ITERATIONS
        few = "" if iterations == ITERATIONS else f", from {iterations}"
        print(f"   {name}: {seconds[name] * 1e3:.2f}ms ({ITERATIONS} iterations{few})")

    (first, base), (second, other) = seconds.items()
    print(f"\n   {second} vs {first}: {versus(other, base)}")
    print(f"   {second if other < base else first} wins!")


def benchmark_library(sizes: max_ops.Sizes, seed: int, device: str) -> None:
    """Time the library's op against PyTorch eager, at the puzzle's size and at a transformer's."""
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    title("Benchmarking the library's op vs PyTorch eager")
    print("   fn.fused_layernorm_linear computes the same by kernels that models use.")
    # Not each size takes the same kernels.
    with compiling("kernels of the library"), torch.no_grad():
        for each in (sizes, TRANSFORMER):
            fn.fused_layernorm_linear(*(t.to(device, dtype) for t in make_data(each, seed)))
    lines = []
    for each in (sizes, TRANSFORMER):
        shape = f"{each.batch_size * each.seq_len}x{each.hidden_dim}x{each.output_dim}"
        print(f"   Testing {shape} performance, for some seconds...", flush=True)
        tensors = [t.to(device, dtype) for t in make_data(each, seed)]

        def eager(tensors: list[Tensor] = tensors) -> Tensor:
            return _pytorch(tensors)

        def ours(tensors: list[Tensor] = tensors) -> Tensor:
            return fn.fused_layernorm_linear(*tensors)

        with torch.no_grad():
            before, after = measure_in_turns((eager, ours), fitting(eager, 0.5))
        times = f"{duration(after)}, eager {duration(before)}"
        lines.append(f"   {shape}: {versus(after, before)} than PyTorch eager ({times})")
    kind = str(dtype).removeprefix("torch.")
    print(f"\n   On {name}, {kind}, rows x features x outputs:")
    print("\n".join(lines))


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
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="document",
        help="4 x 4 x 8 -> 16, as in the document, or 4 x 128 x 768 -> 1024",
    )
    parser.add_argument("--batch", type=int, help="sequences, instead of the size's")
    parser.add_argument("--seq", type=int, help="positions in a sequence")
    parser.add_argument("--hidden", type=int, help="elements of a position")
    parser.add_argument("--output", type=int, help="outputs of a position")
    parser.add_argument("--seed", type=int, default=42, help="of the random data (42)")
    args = parser.parse_args(argv)
    given = args.batch, args.seq, args.hidden, args.output
    pairs = zip(given, astuple(SIZES[args.size]), strict=True)
    args.sizes = max_ops.Sizes(*(size if own is None else own for own, size in pairs))
    try:
        args.sizes.check()
    except ValueError as error:
        parser.error(str(error))
    return args


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _pytorch(tensors: list[Tensor]) -> Tensor:
    x, ln_weight, ln_bias, linear_weight, linear_bias = tensors
    normed = F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias)
    return F.linear(normed, linear_weight, linear_bias)


def _dimensions(sizes: max_ops.Sizes) -> str:
    rows = [sizes.batch_size, sizes.seq_len]
    return f"{[*rows, sizes.hidden_dim]} -> {[*rows, sizes.output_dim]}"


if __name__ == "__main__":
    sys.exit(main())
