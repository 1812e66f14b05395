"""The LayerNorms of the Spiral language as row programs, forward and backward, checked and timed.

    uv run poe layernorm --fused | --unfused | --backward [--batch 16 --seq 64 --hidden 1024 ...]

The fused one trains its eps, the square of o; the unfused one is composed of mean, norm and div.
The exit status is 0 only if everything that ran was correct; without a GPU its parts are SKIPPED.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # What is imported below takes seconds to load.
    print("Loading PyTorch ...", file=sys.stderr, flush=True)

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_norm as fn
from fused_norm import reference
from fused_norm.native.cache import BuildError
from tutorial.puzzle.driver import (
    ITERATIONS,
    compiling,
    differentiate,
    heading,
    measure,
    on_gpu,
    report_difference,
    report_gradients,
    summarize,
    title,
)

MOST_ELEMENTS = 2**28


class Implementation(NamedTuple):
    """A LayerNorm: what computes it from x and o, its formula, and whether it has an o."""

    compute: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    has_o: bool

    def inputs(self, data: list[Tensor]) -> list[Tensor]:
        """Return the inputs that it has."""
        return data if self.has_o else data[:1]


IMPLEMENTATIONS = {
    "fused": Implementation(fn.trainable_eps_layer_norm, reference.trainable_eps_layer_norm, True),
    "unfused": Implementation(fn.composed.layer_norm, reference.composed_layer_norm, False),
}


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments ask for and return the exit status."""
    args = _arguments(argv)
    data, grad_output = make_data((args.batch, args.seq, args.hidden), args.o, args.seed)
    print(f"Testing with dimensions: {list(data[0].shape)}, o = {args.o:g}")
    try:
        correct = run(args.mode, data, grad_output)
    except BuildError as error:
        print(f"The kernels do not compile: {error}", file=sys.stderr)
        return 1
    return 0 if correct else 1


def make_data(shape: tuple[int, ...], o: float, seed: int) -> tuple[list[Tensor], Tensor]:
    """Return x and o, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x, grad_output = (torch.randn(shape, generator=generator) for _ in range(2))
    # Rows away from zero, so that a mean that is left out shows; and dy with a share of y.
    return [x + 0.5, torch.tensor([o])], grad_output + x


def run(mode: str, data: list[Tensor], grad_output: Tensor) -> bool:
    """Check a mode's implementations on each device, then time them."""
    backward = mode == "backward"
    what = "Backward Pass" if backward else f"{mode.upper()} Algorithm"
    heading(f"   Spiral LayerNorm: {what} Test & Benchmark")
    verdicts: dict[str, bool | None] = {}
    on_devices = {"CPU": [*data, grad_output], "GPU": on_gpu([*data, grad_output])}
    names = list(IMPLEMENTATIONS) if backward else [mode]

    title("Testing Reference PyTorch Implementation")
    verdicts["Reference:"] = check_reference(data)
    for device, tensors in on_devices.items():
        for name in names:
            title(f"Testing {device} {name.title()} Implementation")
            label = f"{device} {name}:"
            if tensors is None:
                print("   Result: SKIPPED (no GPU)")
                verdicts[label] = None
                continue
            implementation = IMPLEMENTATIONS[name]
            with compiling(f"row programs for the {device}"):
                try:
                    implementation.compute(*implementation.inputs(tensors[:2]))
                except RuntimeError as error:
                    # The autograd node keeps an error's message, not its type.
                    raise BuildError(str(error)) from error
            print(f"OK Using Mojo {name} kernels ({device})")
            check = check_backward if backward else check_forward
            verdicts[label] = check(implementation, tensors[:2], tensors[2])

    print("\nCorrectness Summary:")
    correct = summarize(verdicts, "Overall Correctness:")
    if not correct:
        print("\nNo benchmark of incorrect kernels")
        return False
    for device, tensors in on_devices.items():
        if tensors is not None:
            benchmark(device, tensors[:2], tensors[2], backward)
    print(f"\n{what} Test Completed!")
    return True


def check_reference(data: list[Tensor]) -> bool:
    """Compare the formula with PyTorch's own LayerNorm."""
    x, o = (tensor.double() for tensor in data)
    expected = F.layer_norm(x, x.shape[-1:], eps=o.item() ** 2)
    return report_difference(reference.trainable_eps_layer_norm(x, o), expected)


def check_forward(implementation: Implementation, data: list[Tensor], _: Tensor) -> bool:
    """Compare an implementation with its formula in float64."""
    inputs = implementation.inputs(data)
    expected = implementation.formula(*(tensor.double() for tensor in inputs))
    return report_difference(implementation.compute(*inputs), expected)


def check_backward(implementation: Implementation, data: list[Tensor], grad_output: Tensor) -> bool:
    """Compare the gradients with those of PyTorch's autograd in float64."""
    inputs = implementation.inputs(data)
    output, computed = differentiate(lambda t: implementation.compute(*t), inputs, grad_output)
    expected, gradients = differentiate(
        lambda t: implementation.formula(*t),
        [tensor.double() for tensor in inputs],
        grad_output.double(),
    )
    forward_correct = report_difference(output, expected)
    names = ("grad_x", "grad_o")[: len(inputs)]
    return report_gradients(names, computed, gradients) and forward_correct


def benchmark(device: str, data: list[Tensor], grad_output: Tensor, backward: bool) -> None:
    """Time the fused LayerNorm, the composed one and PyTorch's, forward or forward and backward."""
    title(f"Benchmarking {device}, {'forward and backward' if backward else 'forward'}")
    x, o = (tensor.clone().requires_grad_(backward) for tensor in data)
    eps = float(o.detach()) ** 2
    contenders: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "F.layer_norm": (lambda: F.layer_norm(x, x.shape[-1:], eps=eps), [x]),
        "composed": (lambda: fn.composed.layer_norm(x), [x]),
        "fused": (lambda: fn.trainable_eps_layer_norm(x, o), [x, o]),
    }
    seconds = {}
    for name, (forward, leaves) in contenders.items():

        def both(forward: Callable[[], Tensor] = forward, leaves: list[Tensor] = leaves) -> Tensor:
            return torch.autograd.grad(forward(), leaves, grad_output)[0]

        seconds[name] = measure(both if backward else forward)
        print(f"   {name}: {seconds[name] * 1e3:.2f}ms ({ITERATIONS} iterations)")
    for other in ("composed", "F.layer_norm"):
        ratio = seconds["fused"] / seconds[other]
        print(f"   fused takes {ratio:.2f} of the time of {other}")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="layernorm", description="The LayerNorms of the Spiral language as row programs"
    )
    modes = parser.add_mutually_exclusive_group(required=True)
    for mode, text in (
        ("fused", "LayerNorm with a trained eps, one kernel"),
        ("unfused", "mean, norm and div after each other"),
        ("backward", "the gradients of both"),
    ):
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=text)
    parser.add_argument("--batch", type=int, default=16, help="sequences (16)")
    parser.add_argument("--seq", type=int, default=64, help="positions in a sequence (64)")
    parser.add_argument("--hidden", type=int, default=1024, help="elements of a position (1024)")
    parser.add_argument("--o", type=float, default=0.25, help="the scalar whose square is eps")
    parser.add_argument("--seed", type=int, default=42, help="of the random data (42)")
    args = parser.parse_args(argv)
    sizes = (args.batch, args.seq, args.hidden)
    # A row of one element has no variance.
    if min(args.batch, args.seq) < 1 or args.hidden < 2:
        parser.error(f"sizes must be at least 1, and 2 for hidden, got {list(sizes)}")
    if args.batch * args.seq * args.hidden > MOST_ELEMENTS:
        parser.error(f"there must be at most {MOST_ELEMENTS} elements, got {list(sizes)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
