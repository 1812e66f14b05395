"""What a forward costs each way on Hopper."""

from __future__ import annotations

from typing import NamedTuple


class GpuCall(NamedTuple):
    """What a forward took.

    Attributes:
        dtype: Name of the tensors' dtype.
        M: Rows.
        K: Features.
        N: Outputs.
        graph: Microseconds by way, replayed from a CUDA graph, and of PyTorch's ops as "eager".
        launched: The same, launched one after another.
    """

    dtype: str
    M: int
    K: int
    N: int
    graph: dict[str, float]
    launched: dict[str, float]
