"""What a result keeps of an exception, of any origin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import memory
from benchmarks.runs import Result


def record(result: Result, error: BaseException) -> None:
    """Say in a result what its provider raised.

    Args:
        result: Of the provider.
        error: What was raised.
    """
    result.status = "oom" if memory.is_out_of_memory(error) else "failed"
    result.message = f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def kept(result: Result) -> Iterator[None]:
    """Keep in a result what its provider raises within, so that the run goes on.

    Args:
        result: Of the provider.
    """
    try:
        yield
    except Exception as error:
        # A provider may be another project's, on compilers and drivers of its own: any of them may
        # raise whatever it likes.
        record(result, error)


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or an empty string."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
