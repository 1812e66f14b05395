"""The strategies that plans are asked for, and how the chain learns of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fused_norm.chain import kernels, library

# Whether the chain was last told to dispatch as users have it; None where a test told it otherwise.
told: list[bool | None] = [None]


def tell_again() -> None:
    """Have the chain ask again for kernels, and for the strategy that their plans are asked for."""
    # What the chain is told here may be undone before the next test.
    told[0] = None
    if (chain := library.load()) is not None:
        kernels.tell(chain)


@contextmanager
def told_by(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Have the chain told by another function of chain/kernels.py.

    Args:
        name: Whose place it takes.
        function: The function.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, name, function)
        tell_again()
        try:
            yield
        finally:
            patch.undo()
            tell_again()


@contextmanager
def hopper_goes(strategy: int, kept: int | None = None) -> Iterator[None]:
    """Have Hopper's forward go one way at every size.

    Args:
        strategy: The strategy.
        kept: That where a fold may be kept, if it is another.
    """
    strategies = (strategy, strategy if kept is None else kept)
    with told_by("gpu_strategy", lambda may_keep: strategies[may_keep]):
        yield


@contextmanager
def our_products_run() -> Iterator[None]:
    """Have Hopper's products be ours wherever there is a kernel: nothing says what they cost."""
    with told_by("hopper_costs", lambda device, dtype: 0):
        yield


def pass_failed(words: str) -> None:
    """Replace the warning that a pass over a graph failed, which would hide a defect."""
    raise AssertionError(f"the pass failed: {words}")
