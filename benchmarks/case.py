"""What a measurement is made of: an op's inputs and outputs, and the work that it cannot avoid.

FLOPs count the matrix products where there are any. Bytes count every input read once and every
output written once, whatever else an implementation moves, so the rates of two implementations
compare as their times do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.shapes import Shape

Mode = Literal["forward", "forward_grad", "backward", "train"]
MODES: tuple[Mode, ...] = get_args(Mode)
MODE_DESCRIPTIONS: dict[Mode, str] = {
    "forward": "under no_grad, as in inference",
    "forward_grad": "saves what a backward needs",
    "backward": "all gradients, of one forward",
    "train": "forward and backward, all gradients",
}
EPS = 1e-5

Outputs = Tensor | tuple[Tensor, ...]
Formula = Callable[..., Outputs]


class Input(NamedTuple):
    """A random input of an op.

    Attributes:
        sizes: Its shape.
        mean: Mean of its elements.
        std: Their standard deviation.
        is_matrix: Whether every row of x is multiplied with it.
        is_summand: Whether it is added to x at once: a backward needs only the sum, and the
            gradient of the sum is its own.
        is_scalar: Whether it is one number for all rows: the sum of what each adds to its gradient
            may cancel.
    """

    sizes: tuple[int, ...]
    mean: float = 0.0
    std: float = 1.0
    is_matrix: bool = False
    is_summand: bool = False
    is_scalar: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.sizes).numel()


def rows(shape: Shape) -> Input:
    """Return x."""
    return Input((shape.M, shape.K))


def gamma(count: int) -> Input:
    """Return the weight of a norm."""
    return Input((count,), mean=1.0, std=0.2)


def vector(count: int) -> Input:
    """Return a bias."""
    return Input((count,), std=0.2)


def matrix(outputs: int, features: int) -> Input:
    """Return the weight of a Linear layer."""
    return Input((outputs, features), std=features**-0.5, is_matrix=True)


@dataclass(frozen=True)
class Op:
    """An op to measure.

    Attributes:
        name: What `--op` calls it.
        title: What it is called in reports.
        inputs: Returns its inputs for a shape, by name, x first.
        outputs: Returns the sizes of its outputs' last dimensions, by name.
        reference: Computes it from the inputs, differentiably, in whatever dtype they have.
        flops: Floating-point operations of a forward; None for those of the products.
        statistics: Numbers that a norm keeps of each row, in float32.
        has_outputs: Whether N means anything to it.
    """

    name: str
    title: str
    inputs: Callable[[Shape], dict[str, Input]]
    outputs: Callable[[Shape], dict[str, int]]
    reference: Formula
    flops: Callable[[Shape], int] | None = None
    statistics: int = 2
    has_outputs: bool = True

    def operations(self, shape: Shape, mode: Mode) -> int:
        """Return the FLOPs of a mode: a backward has two products for each of the forward's."""
        if self.flops is None:
            matrices = sum(i.elements for i in self.inputs(shape).values() if i.is_matrix)
            flops = 2 * shape.M * matrices
        else:
            flops = self.flops(shape)
        return flops * {"backward": 2, "train": 3}.get(mode, 1)

    def traffic(self, shape: Shape, mode: Mode, itemsize: int) -> int:
        """Return the bytes that must move, however it is computed."""
        inputs = self.inputs(shape).values()
        read = sum(i.elements for i in inputs)
        needed = sum(i.elements for i in inputs if not i.is_summand)
        written = shape.M * sum(self.outputs(shape).values())
        statistics = 4 * self.statistics * shape.M
        forward = itemsize * (read + written)
        # Reads the outputs' gradients and the inputs; writes the inputs' gradients.
        backward = itemsize * (written + 2 * needed) + statistics
        return {
            "forward": forward,
            "forward_grad": forward + statistics,
            "backward": backward,
            "train": forward + statistics + backward,
        }[mode]

    def held(self, shape: Shape, itemsize: int) -> int:
        """Return about how many bytes one call holds: inputs, products and outputs."""
        inputs = self.inputs(shape).values()
        products = shape.M * sum(i.sizes[0] for i in inputs if i.is_matrix)
        outputs = shape.M * sum(self.outputs(shape).values())
        return itemsize * (sum(i.elements for i in inputs) + max(products, outputs))


@dataclass(frozen=True)
class Case:
    """An op at one shape, in one dtype, on one device."""

    op: Op
    shape: Shape
    dtype: torch.dtype
    device: torch.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that the op knows."""
        return tuple(self.shape) if self.op.has_outputs else tuple(self.shape[:2])

    def inputs(self, seed: int) -> list[Tensor]:
        """Return random inputs on the device, all of which require gradients."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = self.op.inputs(self.shape).values()
        return [_normal(each, self.dtype, generator).requires_grad_() for each in made]

    def grad_outputs(self, seed: int) -> list[Tensor]:
        """Return random gradients of the outputs: ones would hide half of a LayerNorm's."""
        generator = torch.Generator(self.device).manual_seed(seed + 1)
        leading = self.op.inputs(self.shape)["x"].sizes[:-1]
        widths = self.op.outputs(self.shape).values()
        return [_normal(Input((*leading, width)), self.dtype, generator) for width in widths]

    def __str__(self) -> str:
        return f"{self.op.name} {dtype_name(self.dtype)} {'x'.join(map(str, self.sizes))}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def listed(outputs: Outputs) -> list[Tensor]:
    """Return what a call returned, one tensor or several, as a list."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _normal(made: Input, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    sample = torch.randn(made.sizes, generator=generator, device=generator.device)
    return sample.mul_(made.std).add_(made.mean).to(dtype)
