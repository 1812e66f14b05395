"""Twenty steps by each of PyTorch's optimizers, each in three implementations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiling import ITS_OWN_WARNINGS
from devices import GPU
from torch import Tensor
from training import KINDS, Recipe, Subject, check_training

pytestmark = [*ITS_OWN_WARNINGS, pytest.mark.usefixtures("own_kernels")]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.2, "momentum": 0.5},
    "Adam": {"lr": 0.01, "eps": 1e-4},
    "AdamW": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.02, "eps": 1e-4},
}
IMPLEMENTATIONS = ("foreach", "fused", "compiled")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def by(name: str, implementation: str, then: str) -> Recipe:
    """Return the recipe: one object of each, by which the references are kept."""

    def recipe(trained: Subject) -> Callable[[int], Tensor]:
        options = dict(OPTIMIZERS[name])
        if implementation != "compiled":
            options[implementation] = True
        optimizer = getattr(torch.optim, name)(trained.module.parameters(), **options)
        update = optimizer.step
        if implementation == "compiled":
            update = torch.compile(update, backend=then)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = trained.loss(i)
            loss.backward()
            update()
            return loss

        return step

    return recipe


def cases() -> Iterator[Any]:
    """Give kinds, implementations, names and dtypes.

    On a CPU, compiling takes seconds: Adam's step is compiled as AdamW's is, Adagrad's as SGD's is.
    The backend compiles for each case, of which every other is slow, so that each dtype meets each
    optimizer and each implementation.
    """
    for case in itertools.product(KINDS, IMPLEMENTATIONS, OPTIMIZERS, DTYPES, ["cpu", "cuda"]):
        kind, implementation, name, dtype, device = case
        if implementation == "compiled":
            is_slow = (kind, dtype) != ("modules", "float32") or name in ("Adam", "Adagrad")
        else:
            places = IMPLEMENTATIONS.index(implementation), [*OPTIMIZERS].index(name)
            is_slow = kind == "backend" and sum(places) % 2 != [*DTYPES].index(dtype)
        marks: Any = pytest.mark.slow if is_slow else ()
        if device == "cuda":
            marks = GPU.marks
        yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.parametrize(("kind", "implementation", "name", "dtype", "device"), list(cases()))
def test_optimizer(kind: str, implementation: str, name: str, dtype: str, device: str) -> None:
    """Regression: results of parameters before a fused step, which changes no version counter."""
    then = "inductor" if device == "cuda" else "aot_eager"
    try:
        check_training(by(name, implementation, then), kind, device, DTYPES[dtype])
    except RuntimeError as error:
        if "`fused=True` requires" not in str(error):
            raise
        pytest.skip(f"this PyTorch has no fused {name} there")
