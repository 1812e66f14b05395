"""What is measured: each op's inputs, its mathematics, and the work that it cannot avoid.

FLOPs count the matrix products where there are any. Bytes count every input read once and every
output written once, whatever an implementation moves besides, so the rates of two implementations
compare as their times do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fused_norm import reference
from fused_norm.bench.shapes import Shape

Mode = Literal["forward", "forward_grad", "backward", "train"]
MODES: tuple[Mode, ...] = get_args(Mode)
MODE_DESCRIPTIONS: dict[Mode, str] = {
    "forward": "under no_grad, as in inference",
    "forward_grad": "with everything kept that a backward needs",
    "backward": "all gradients of one forward that has been run",
    "train": "forward and backward, all gradients",
}
EPS = 1e-5
# The trained eps of the row program: far from 0 and from 1, so that a lost one shows.
SCALE = 0.25

Formula = Callable[..., Tensor]


@dataclass(frozen=True)
class Op:
    """An op to measure.

    Attributes:
        name: What `--op` calls it.
        title: What it is called in reports.
        names: Its inputs.
        make: Returns random inputs for a shape, a dtype and a generator.
        reference: Computes it from the inputs, differentiably, in whatever dtype they have.
        flops: Floating-point operations of a forward.
        has_outputs: Whether N means anything to it.
    """

    name: str
    title: str
    names: tuple[str, ...]
    make: Callable[[Shape, torch.dtype, torch.Generator], list[Tensor]]
    reference: Formula
    flops: Callable[[Shape], int]
    has_outputs: bool

    def operations(self, shape: Shape, mode: Mode) -> int:
        """Return the FLOPs of a mode: a backward has two products for each of the forward's."""
        return self.flops(shape) * {"backward": 2, "train": 3}.get(mode, 1)

    def traffic(self, shape: Shape, mode: Mode, itemsize: int) -> int:
        """Return the bytes that must move, however it is computed."""
        rows, features, outputs = shape
        # x, y or dy, and the parameters, in elements.
        x = rows * features
        y = rows * outputs if self.has_outputs else x
        parameters = outputs * features + 2 * features + outputs if self.has_outputs else 1
        # Mean and rstd in float32.
        statistics = 8 * rows
        forward = itemsize * (x + parameters + y)
        # Reads dy, x and the parameters; writes dx and the parameters' gradients.
        backward = itemsize * (y + 2 * x + 2 * parameters) + statistics
        return {
            "forward": forward,
            "forward_grad": forward + statistics,
            "backward": backward,
            "train": forward + statistics + backward,
        }[mode]


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
        tensors = self.op.make(self.shape, self.dtype, generator)
        return [tensor.requires_grad_() for tensor in tensors]

    def grad_output(self, seed: int) -> Tensor:
        """Return a random gradient of the output: ones would hide half of a LayerNorm's."""
        generator = torch.Generator(self.device).manual_seed(seed + 1)
        width = self.shape.N if self.op.has_outputs else self.shape.K
        return _normal((self.shape.M, width), self.dtype, generator)

    def __str__(self) -> str:
        return f"{self.op.name} {dtype_name(self.dtype)} {'x'.join(map(str, self.sizes))}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _normal(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    sample = torch.randn(shape, generator=generator, device=generator.device)
    return sample.mul_(std).add_(mean).to(dtype)


def _layernorm_linear_inputs(
    shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    rows, features, outputs = shape
    return [
        _normal((rows, features), dtype, generator),
        _normal((features,), dtype, generator, mean=1.0, std=0.2),
        _normal((features,), dtype, generator, std=0.2),
        _normal((outputs, features), dtype, generator, std=features**-0.5),
        _normal((outputs,), dtype, generator, std=0.2),
    ]


def _layer_norm_inputs(
    shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    o = torch.full((1,), SCALE, dtype=dtype, device=generator.device)
    return [_normal((shape.M, shape.K), dtype, generator), o]


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            name="layernorm_linear",
            title="LayerNorm + Linear",
            names=("x", "ln_weight", "ln_bias", "linear_weight", "linear_bias"),
            make=_layernorm_linear_inputs,
            reference=reference.layernorm_linear,
            flops=lambda shape: 2 * shape.M * shape.K * shape.N,
            has_outputs=True,
        ),
        Op(
            name="layer_norm",
            title="LayerNorm as a row program",
            names=("x", "o"),
            make=_layer_norm_inputs,
            reference=reference.trainable_eps_layer_norm,
            # Sum, center, square, sum, divide.
            flops=lambda shape: 5 * shape.M * shape.K,
            has_outputs=False,
        ),
    )
}
