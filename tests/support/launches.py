"""What a call launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def names(function: Callable[[], Any]) -> str:
    """Return the names of the kernels that a call launches."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        function()
        torch.cuda.synchronize()
    return " ".join(event.key for event in found.key_averages())
