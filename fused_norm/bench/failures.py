"""What a result keeps of an exception, whoever raised it."""

from __future__ import annotations

from fused_norm.bench import memory
from fused_norm.bench.results import Result


def record(result: Result, error: BaseException) -> None:
    """Say in a result what its provider raised.

    Args:
        result: Of the provider.
        error: What was raised.
    """
    result.status = "oom" if memory.is_out_of_memory(error) else "failed"
    result.message = f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or an empty string."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
