"""MLPs in FP8 with a gate whose hidden columns differ in size, and what is done about that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fp8_bounds import layer
from fp8_products import decibels
from torch import Tensor

import fused_norm as fn
from fused_norm.call import frozen
from fused_norm.call.offload import key_of
from fused_norm.ops import scaled_hidden

# The dB that hidden rows, and with them whole MLPs, may lose.
LOST = 0.45
# Features, and hidden ones.
K, N = 512, 1536
RECIPES = ["rowwise", "tensorwise", "rowwise_with_gw_hp"]
Change = Callable[[fn.LayerNormMLP], None]


@contextmanager
def folds() -> Iterator[list[float | None]]:
    """Yield for each call the scale of hidden rows whose columns have factors, None without."""
    found: list[float | None] = []
    original = scaled_hidden.folded

    def noting(*given: Any) -> Any:
        made = original(*given)
        found.append(None if made is None else made.one_scale)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_hidden, "folded", noting)
        yield found


def without_columns(mlp: Callable[..., Any], x: Tensor, **more: Any) -> Tensor:
    """Return a result whose hidden columns have no factors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_hidden, "folded", lambda *_: None)
        y: Tensor = mlp(x, **more)
        return y


def spread(size: float) -> Change:
    """Return what makes the rows of the first weight differ: by exp(N(0, size)) each."""

    def change(mlp: fn.LayerNormMLP) -> None:
        torch.manual_seed(6)
        mlp.fc1_weight *= torch.randn(len(mlp.fc1_weight), 1).mul(size).exp()

    return change


def large(gate: float, up: float, columns: int = 1) -> Change:
    """Return what makes a few columns larger, by what they are gated with and what is gated."""

    def change(mlp: fn.LayerNormMLP) -> None:
        for half, factor in zip(mlp.fc1_weight.chunk(2), (gate, up), strict=True):
            half[7 : 7 + columns] *= factor

    return change


def tails(mlp: fn.LayerNormMLP) -> None:
    """Make all weights Student's t with three degrees of freedom, and their rows differ."""
    torch.manual_seed(4)
    for weight in (mlp.fc1_weight, mlp.fc2_weight):
        weight.copy_(
            torch.distributions.StudentT(3.0).sample(weight.shape) / weight.shape[1] ** 0.5
        )
    spread(0.4)(mlp)


def gated(
    normalization: str = "RMSNorm",
    change: Change | None = None,
    size: tuple[int, int] = (K, N),
    device: str = "cpu",
    **options: Any,
) -> fn.LayerNormMLP:
    """Return an MLP with a gate, of which one scale for hidden rows is refused without factors.

    It has the same parameters on each device.
    """
    change = spread(0.8) if change is None else change
    activation = options.pop("activation", "swiglu")
    return layer(normalization, activation, change, size=size, **options).to(device)


def exact(mlp: fn.LayerNormMLP, x: Tensor, **more: Tensor) -> Tensor:
    wide = copy.deepcopy(mlp).double()
    wide.recipe = None
    y: Tensor = wide(x.double(), **{name: v.double() for name, v in more.items()})
    return y


def assert_as_precise(mlp: fn.LayerNormMLP, x: Tensor, **more: Tensor) -> None:
    """Compare with a scale for each row: in all, and without a residual row by row."""
    truth = exact(mlp, x, **more)
    with folds() as used:
        found = mlp(x, **more)
    assert used[0]
    other = without_columns(mlp, x, **more)
    assert not torch.equal(found, other)
    assert decibels(found, truth) > decibels(other, truth) - LOST
    if not more:
        # No row is worse than others.
        noise, least = ((v - truth).norm(dim=-1) / truth.norm(dim=-1) for v in (found, other))
        assert noise.max() < 1.3 * least.max()


def made_of(weight: Tensor) -> list[str]:
    """Return what is kept that was made of a frozen weight."""
    (record,) = frozen.of([weight])
    kept: Any = record._prepared
    return sorted(name for name, *_, keys in kept if key_of(weight) in keys)
