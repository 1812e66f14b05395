"""Gradients of an output that a call returned in parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def of_all_parts(
    grad_outputs: Sequence[Tensor | None], sizes: Sequence[int]
) -> list[Tensor | None]:
    """Return gradients of parts of an output, zeros for those that nothing depends on.

    Args:
        grad_outputs: The gradients of the parts, then those of other results.
        sizes: The features of each part.

    Returns:
        One for each part, or None for all of them; then the others.
    """
    parts, others = grad_outputs[: len(sizes)], grad_outputs[len(sizes) :]
    like = next((g for g in parts if g is not None), None)
    if like is None:
        return [None, *others]
    rows = like.shape[:-1]
    pairs = zip(parts, sizes, strict=True)
    found = [like.new_zeros((*rows, size)) if g is None else g for g, size in pairs]
    return [*found, *others]
