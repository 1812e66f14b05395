"""The mode in which this package's calls compute their Linear layers in FP8."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.compiler import is_dynamo_compiling

from fused_norm import recipes

_mode: ContextVar[str | None] = ContextVar("fused_norm.autocast_fp8", default=None)
_lock = threading.Lock()
# The recipes of all blocks that were entered and not left, by block. Compilers guard on the last
# one, as not all support context variables.
_inside: dict[object, str] = {}
_of_anyone: str | None = None


@contextmanager
def autocast_fp8(recipe: str = "rowwise") -> Iterator[None]:
    """Compute the Linear layers of this package's calls in FP8.

        with fn.autocast_fp8("rowwise"):
            loss = model(batch)

    It applies to `norm_linear`, `norm_mlp`, `linear_add` and the modules, unless a call has its own
    `recipe=`.
    PyTorch's own layers do not change. The backward uses the recipe of its forward, wherever it
    runs. The mode applies to its own thread or asyncio task. It nests, and works as a decorator. A
    compiled function is compiled again for it, and is in it while any thread is.

    Args:
        recipe: `"rowwise"`, `"tensorwise"`, `"rowwise_with_gw_hp"` or `"blockwise"`.

    Raises:
        ValueError: If the recipe is not known.
        RuntimeError: From calls inside, as `norm_linear` with a recipe.
    """
    recipes.find(recipe)
    before, block = _mode.set(recipe), object()
    _enter(block, recipe)
    try:
        yield
    finally:
        # First: in another task than that which entered the block, the other is an error.
        _leave(block)
        _mode.reset(before)


def chosen(recipe: str | None) -> str | None:
    """Return the recipe of a call, None without FP8.

    Args:
        recipe: The call's own, None for the mode's, `""` for none.
    """
    if recipe is not None:
        return recipe or None
    return _of_anyone if is_dynamo_compiling() else _mode.get()


def state() -> tuple[str | None, str | None]:
    """Return the recipe of the caller's calls, and that of calls traced by a compiler."""
    return _mode.get(), _of_anyone


def _enter(block: object, recipe: str) -> None:
    global _of_anyone
    with _lock:
        _inside[block] = _of_anyone = recipe


def _leave(block: object) -> None:
    global _of_anyone
    with _lock:
        del _inside[block]
        _of_anyone = next(reversed(_inside.values()), None)
