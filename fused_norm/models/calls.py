"""The call that replaces a norm and its readers, before it is added to a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from fused_norm.functional import linear_add, norm_linear, norm_mlp
from fused_norm.models.activations import Activated
from fused_norm.models.output_parts import OutputParts
from fused_norm.models.readers import Product, Reading
from fused_norm.models.timing import Replaced
from fused_norm.ops.output_parts import norm_linear_in_parts

CALLS = (norm_linear, norm_linear_in_parts, norm_mlp, linear_add)
"""The functions that are added to graphs."""


class Left(Exception):
    """A norm, a head or a rotation stays as it is; the message says why."""


@dataclass
class FusedCall:
    """A call that replaces a norm and some of its readers.

    Attributes:
        reading: The readers that it replaces.
        activated: The activation and what follows, or None.
        total: The node of the sum that is normalized, if the call adds, and its summands.
        returns_sum: Whether the sum is read elsewhere.
        passes_on: The norm's input, if later readers are to read it through the call: its backward
            then adds their gradients. Otherwise None.
        norm: The node that its normalized rows replace for other readers, or None.
        parts: The parts in which its only output is read, if it returns them; otherwise None.
        recipe: The FP8 recipe, or None.
        precision: Its precision and the reason in words, `""` if FP8 was not requested.
    """

    reading: Reading
    activated: Activated | None = None
    total: tuple[Node, Node, Node] | None = None
    returns_sum: bool = False
    passes_on: Node | None = None
    norm: Node | None = None
    parts: OutputParts | None = None
    recipe: str | None = None
    precision: str = ""

    def inner(self) -> set[Node]:
        """Return the nodes that the call replaces, except the norm's."""
        nodes = set(self.reading.inner)
        for product in self.reading.products:
            nodes |= product.inner
        if self.activated is not None:
            nodes |= self.activated.inner
        if self.total is not None:
            nodes.add(self.total[2])
        return nodes

    def results(self) -> list[Node]:
        """Return the nodes that its outputs replace."""
        if self.activated is not None:
            return [self.activated.out]
        if self.parts is not None:
            return [picked.node for picked in self.parts.picked]
        return [product.out for product in self.reading.products]

    def products(self) -> list[Product]:
        """Return its Linear layers, in the order of its operands."""
        if self.activated is None:
            return self.reading.products
        second = self.activated.second
        return self.activated.products + ([] if second is None else [second])

    def launches(self) -> int:
        """Return how many kernels and products the call launches if a separate pass normalizes."""
        return 1 + len(self.products()) + (self.activated is not None)

    def words(self) -> str:
        """Return a short description."""
        is_mlp = self.activated is not None and self.activated.second is not None
        parts = ["modulation"] * (self.reading.modulation is not None)
        parts += ["residual"] * (self.total is not None)
        if self.activated is not None:
            parts.append(self.activated.name)
            parts += ["residual after"] * (self.activated.residual is not None)
        else:
            parts.append(f"{len(self.reading.products)} Linear")
            parts += [f"in {len(self.parts.sizes)} parts"] if self.parts is not None else []
        return f"{'norm_mlp' if is_mlp else 'norm_linear'}: {', '.join(parts)}"


class Rewritten(NamedTuple):
    """What became of a norm.

    Attributes:
        calls: The calls that replace it.
        bytes_saved: Bytes of tensors that a forward no longer writes.
        ops_before: Ops that ran before.
        ops_after: Kernels and products that run now.
        replaced: Copies of the old and the new nodes, if they are to be timed.
    """

    calls: list[FusedCall]
    bytes_saved: int
    ops_before: int
    ops_after: int
    replaced: Replaced | None = None
