"""Collectives of processes that share a vocabulary: the largest logits, and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def largest(z: Tensor, group: str) -> Tensor:
    """Return the largest entry of each row, over all processes.

    Args:
        z: Shape `[rows, classes]`; a process may have no classes.
        group: Name of the process group, "" for this process alone.
    """
    if not group:
        return z.amax(1)
    own = z.amax(1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)
    return _all_reduced(own, "max", group)


def totals(summands: Sequence[Tensor | None], group: str) -> list[Any]:
    """Return the sums over all processes; None stays None.

    Args:
        summands: Tensors of one shape.
        group: Name of the process group, "" for this process alone.
    """
    if not group:
        return list(summands)
    given = [v for v in summands if v is not None]
    found = iter(_all_reduced(torch.stack(given), "sum", group).unbind())
    return [None if v is None else next(found) for v in summands]


def _all_reduced(tensor: Tensor, op: str, group: str) -> Tensor:
    found: Tensor = torch.ops._c10d_functional.all_reduce(tensor, op, group)
    found = torch.ops._c10d_functional.wait_tensor(found)
    return found
