"""Weights that are subclasses of Tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Wrapped(Tensor):
    """A weight as torchao keeps it: other values inside."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, dtype: torch.dtype | None = None) -> Any:
        """Wrap values, and look like a tensor of another dtype."""
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype or values.dtype)
        made.values = values
        return made
