"""The triangle multiplicative update of AlphaFold on fused_norm: five Linear layers on one norm.

Rows and columns of a matrix of pairs are the parts of a protein. An edge i-j is updated from all
k by the edges i-k and j-k (Jumper et al., 2021, algorithm 11, "outgoing"):

    z = norm(x);  left, right = mask * Linear(z) * sigmoid(Linear(z)), twice
    pairs[i, j] = sum_k left[i, k] * right[j, k];  y = Linear(norm(pairs) * sigmoid(Linear(z)))

Shapes, distributions and the tolerance are those of the problem `trimul` of GPU MODE
(https://github.com/gpu-mode/reference-kernels), whose module follows Phil Wang's
(https://github.com/lucidrains/triangle-multiplicative-module, MIT); the code here is our own, from
the formulas. A gate by sigmoid is none of our activations, so those stay PyTorch's; the last one is
a modulation of the norm: norm(pairs) * (1 + scale) with scale = sigmoid(h) - 1 = -sigmoid(-h).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from side_by_side import Block, main
from torch import Tensor, nn

import fused_norm as fn


class Shape(NamedTuple):
    """A batch of matrices of pairs.

    Attributes:
        length: Rows and columns.
        batch: How many matrices.
        width: Features of an edge.
        is_masked: Whether half of the edges are left out; none are otherwise.
        is_cauchy: Whether features have a Cauchy's heavy tails; they are normal otherwise.
    """

    length: int
    batch: int
    width: int
    is_masked: bool = False
    is_cauchy: bool = False


HIDDEN = 128
# What the problem is timed at.
SHAPES = {
    "cuda": (
        Shape(256, 2, 128),
        Shape(768, 1, 128, is_cauchy=True),
        Shape(256, 2, 384, is_masked=True),
        Shape(512, 1, 128),
        Shape(1024, 1, 128, is_cauchy=True),
        Shape(768, 1, 384, is_masked=True),
        Shape(1024, 1, 384),
    ),
    "cpu": (Shape(64, 2, 256, is_masked=True), Shape(128, 1, 128, is_cauchy=True)),
    "quick": (Shape(24, 2, 128, is_masked=True), Shape(32, 1, 128, is_cauchy=True)),
}
TOLERANCE = 2e-2


class Plain(nn.Module):
    """The update, a module of PyTorch's for each step.

    Args:
        width: Features of an edge.
        hidden: Features in between.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.pairs_norm = nn.LayerNorm(width), nn.LayerNorm(hidden)
        # Left and right, their gates, and the gate of the output.
        self.projections = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(5))
        self.out = nn.Linear(hidden, width, bias=False)

    def initialize(self) -> None:
        """Give all parameters random values, the norms' too."""
        for norm in (self.norm, self.pairs_norm):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        # Of both kinds of Linear layers by the number of outputs.
        for linear in (*self.projections, self.out):
            nn.init.normal_(linear.weight, std=linear.weight.shape[0] ** -0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return `[batch, length, length, width]`, as x is; mask has all of that but the width."""
        z = self.norm(x)
        left, right, left_gate, right_gate, out_gate = (linear(z) for linear in self.projections)
        pairs = multiplied(left, left_gate, right, right_gate, mask)
        y: Tensor = self.out(self.pairs_norm(pairs) * out_gate.sigmoid())
        return y


class Fused(Plain):
    """The same: the projections are one op, and the second norm with gate and Linear another."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return `[batch, length, length, width]`, as x is; mask has all of that but the width."""
        left, right, left_gate, right_gate, out_gate = fn.norm_linear(
            x,
            list(self.projections.parameters()),
            norm_weight=self.norm.weight,
            norm_bias=self.norm.bias,
            eps=self.norm.eps,
        )
        y: Tensor = fn.norm_linear(
            multiplied(left, left_gate, right, right_gate, mask),
            self.out.weight,
            norm_weight=self.pairs_norm.weight,
            norm_bias=self.pairs_norm.bias,
            eps=self.pairs_norm.eps,
            scale=-torch.sigmoid(-out_gate),
        )
        return y


def multiplied(
    left: Tensor, left_gate: Tensor, right: Tensor, right_gate: Tensor, mask: Tensor
) -> Tensor:
    """Return the sums over k of gated and masked edges."""
    seen = mask.unsqueeze(-1)
    left, right = left * seen * left_gate.sigmoid(), right * seen * right_gate.sigmoid()
    return torch.einsum("bikc,bjkc->bijc", left, right)


def block(shape: Shape, device: torch.device) -> Block:
    """Return the update in two versions, of one set of parameters, and random inputs.

    Args:
        shape: Its shape.
        device: Where.
    """
    torch.manual_seed(0)
    plain = Plain(shape.width, HIDDEN).to(device)
    plain.initialize()
    fused = Fused(shape.width, HIDDEN)
    for name, module in plain.named_children():
        setattr(fused, name, module)
    edges = (shape.batch, shape.length, shape.length)
    x = torch.empty(*edges, shape.width, device=device)
    x = x.cauchy_(sigma=2.0) if shape.is_cauchy else x.normal_()
    mask = torch.ones(edges, device=device)
    if shape.is_masked:
        mask.bernoulli_(0.5)
    name = f"{shape.batch} x {shape.length}^2 x {shape.width}"
    name += ", masked" * shape.is_masked + ", Cauchy" * shape.is_cauchy
    versions: dict[str, Callable[..., Tensor]] = {"PyTorch": plain, "fused_norm": fused}
    return Block(name, [x, mask], versions, list(plain.parameters()), TOLERANCE)


def blocks(device: torch.device, quick: bool) -> list[Callable[[], Block]]:
    """Return makers of all blocks for a device.

    Args:
        device: Where.
        quick: Whether to have small ones.
    """
    shapes = SHAPES["quick" if quick else device.type]
    return [partial(block, shape, device) for shape in shapes]


if __name__ == "__main__":
    sys.exit(main("Triangle multiplicative update, float32", blocks))
