"""What was made from a call's parameters, in memory that outlives the call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Prepared:
    """Tensors made from a call's parameters, ready to be read on every stream.

    Attributes:
        tensors: The tensors.
        stream: The raw stream on which their memory was allocated.
        is_captured: Whether a CUDA graph reads them.
        activation: The number of the activation in the epilogue that they are for.
    """

    tensors: tuple[Tensor, ...]
    stream: int = 0
    is_captured: bool = False
    activation: int = 0

    def read_on(self, stream: int, in_graph: bool) -> None:
        """Keep the memory until its reader is done.

        Args:
            stream: The raw stream that is about to read.
            in_graph: Whether a CUDA graph captures that.
        """
        if in_graph:
            self.is_captured = True
        elif stream != self.stream:
            for tensor in self.tensors:
                tensor.record_stream(torch.cuda.ExternalStream(stream, tensor.device))


def allocate(make: Callable[[], tuple[Tensor, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """Return tensors from the allocator's general memory, not from a CUDA graph's.

    PyTorch's compiler has a thread allocate in a graph's memory before it captures the graph, and
    reports an error if such memory outlives the call.

    Args:
        make: Allocates them.
        device: The device.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def run() -> tuple[Tensor, ...]:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as other:
        return other.submit(run).result()
