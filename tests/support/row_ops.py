"""The ops that are row programs, each with its formula in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fused_norm as fn
from fused_norm import reference

SCALE = 0.25


class Op(NamedTuple):
    """An op under test: what it is called by, its formula, and what its inputs are."""

    call: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    names: tuple[str, ...]

    def inputs(
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        mean: float = 0.0,
        requires_grad: bool = False,
    ) -> list[Tensor]:
        tensors = []
        for name in self.names:
            if name == "o":
                tensor = torch.tensor([SCALE])
            else:
                tensor = torch.randn(shape, dtype=torch.float64) + mean
            if name == "b":
                # A divisor near 0 would leave nothing else to see.
                tensor = 1 + tensor.abs()
            tensors.append(tensor.to(device, dtype).requires_grad_(requires_grad))
        return tensors


OPS = {
    "trainable_eps": Op(
        fn.trainable_eps_layer_norm, reference.trainable_eps_layer_norm, ("x", "o")
    ),
    "mean": Op(fn.composed.mean, reference.mean, ("x",)),
    "norm": Op(fn.composed.norm, reference.norm, ("v",)),
    "div": Op(fn.composed.div, reference.div, ("a", "b")),
    "layer_norm": Op(fn.composed.layer_norm, reference.composed_layer_norm, ("x",)),
}
