"""What kernels return of a call of the family, and what its backward needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fused_norm.composition import Operands, Spec, has_sum
from fused_norm.norms import NORMS


class Results(NamedTuple):
    """The results of a call, and what its backward needs.

    Attributes:
        outputs: One for each weight; a single one if they are joined or a second Linear follows.
        sum: What is normalized, if it is not x, and is a result or kept.
        norm: The normalized rows, if they are a result.
        mean: One for each row, if it is kept and was not given.
        rstd: The same.
        products: The products before their activation, if they are kept.
    """

    outputs: Sequence[Tensor]
    sum: Tensor | None
    norm: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    products: Sequence[Tensor]

    def flat(self) -> list[Tensor]:
        """Return the fields in one list, without absent ones."""
        return [
            *self.outputs,
            *(t for t in self[1:5] if t is not None),
            *self.products,
        ]

    @classmethod
    def unflat(cls, results: Sequence[Tensor], spec: Spec, t: Operands, keeps: bool) -> Results:
        """Return the results that `flat` made a list of.

        Args:
            results: The list.
            spec: What was computed.
            t: Its tensors.
            keeps: Whether a backward follows.
        """
        products = 1 if spec.is_joined else len(t.weights)
        outputs = 1 if t.out_weight is not None else products
        rest = iter(results[outputs:])
        there = (
            has_sum(t) and (keeps or spec.returns_sum),
            spec.returns_norm,
            keeps and NORMS[spec.normalization].has_mean and t.mean is None,
            keeps and t.rstd is None,
        )
        found = [next(rest) if is_there else None for is_there in there]
        return cls._make((results[:outputs], *found, list(rest)))
