"""Twenty steps of the loops that people write, around modules, functions and the backend."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accuracy import assert_within_budget
from compiling import ITS_OWN_WARNINGS
from devices import GPU
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from training import KINDS, Recipe, Subject, check_training

pytestmark = [
    *ITS_OWN_WARNINGS,
    # PyTorch's compiler, where a graph breaks between two blocks.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("own_kernels"),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
of_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
of_kinds = pytest.mark.parametrize("kind", KINDS)
Update = Callable[[int], Tensor]


def fused_adam(trained: Subject) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.module.parameters(), lr=0.01, eps=1e-4, fused=True)


def plain(trained: Subject) -> Update:
    optimizer = fused_adam(trained)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = trained.loss(i)
        loss.backward()
        optimizer.step()
        return loss

    return step


def accumulation(trained: Subject) -> Update:
    """Gradients of two parts of a batch, added up in memory that stays."""
    optimizer = fused_adam(trained)

    def step(i: int) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        losses = [trained.loss(i, part) / 2 for part in (slice(0, 2), slice(2, 4))]
        for loss in losses:
            loss.backward()
        optimizer.step()
        return losses[0] + losses[1]

    return step


def clipping(trained: Subject) -> Update:
    optimizer = torch.optim.SGD(trained.module.parameters(), lr=0.5, fused=True)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = trained.loss(i)
        loss.backward()
        nn.utils.clip_grad_norm_(trained.module.parameters(), 0.5)
        optimizer.step()
        return loss

    return step


def scaling(trained: Subject) -> Update:
    """GradScaler in autocast, which skips a step where gradients overflow."""
    device, dtype = trained.data
    optimizer = torch.optim.SGD(trained.module.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.float32):
            loss = trained.loss(i)
        # In the middle one gradient is infinite, and the step is left out.
        scaler.scale(loss * (torch.inf if i == 10 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained.module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def averaging(trained: Subject) -> Update:
    """A moving average, evaluated as a model of its own and instead of the parameters."""
    update = plain(trained)
    averaged = AveragedModel(trained.module, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def step(i: int) -> Tensor:
        loss = update(i)
        averaged.update_parameters(trained.module)
        own = [p.detach().clone() for p in trained.module.parameters()]
        for p, mean in zip(trained.module.parameters(), averaged.module.parameters(), strict=True):
            p.data.copy_(mean.data)
        y = trained.evaluate()
        bar, truth = trained.by_pytorch(trained.parameters())
        with torch.no_grad():
            alone = averaged(trained.data.batch(-1)[0])
        for result in (y, alone):
            assert_within_budget("average", result, truth, bar)
        for p, value in zip(trained.module.parameters(), own, strict=True):
            p.data.copy_(value)
        return loss

    return step


def going_back(assign: bool, trained: Subject) -> Update:
    """In the middle, model and optimizer go back to where they were, from a checkpoint's file."""
    optimizer = fused_adam(trained)
    saved: list[Any] = []

    def step(i: int) -> Tensor:
        if i == 5:
            saved.extend(copy.deepcopy([trained.module.state_dict(), optimizer.state_dict()]))
        if i == 10:
            trained.module.load_state_dict(saved[0], assign=assign)
            if assign:
                # The Parameters are others.
                optimizer.param_groups[0]["params"] = list(trained.module.parameters())
            optimizer.load_state_dict(saved[1])
            trained.evaluate()
        optimizer.zero_grad()
        loss = trained.loss(i)
        loss.backward()
        optimizer.step()
        return loss

    return step


def freezing_parts(trained: Subject) -> Update:
    """Some parameters take no part for a while, and then do."""
    update = plain(trained)

    def step(i: int) -> Tensor:
        for name, p in trained.module.named_parameters():
            p.requires_grad_(i % 8 < 4 or "weight" in name)
        return update(i)

    return step


LOOPS: dict[str, Recipe] = {
    "accumulation": accumulation,
    "clip_grad_norm_": clipping,
    "GradScaler": scaling,
    "AveragedModel": averaging,
    "load_state_dict": functools.partial(going_back, False),
    "load_state_dict assign": functools.partial(going_back, True),
    "requires_grad_": freezing_parts,
}


def cases() -> Iterator[Any]:
    """Give kinds, loops and dtypes.

    The backend compiles for each case, which takes a CPU seconds: each loop has a dtype, and the
    other is slow.
    """
    for case in itertools.product(KINDS, enumerate(LOOPS), enumerate(DTYPES)):
        kind, (i, loop), (j, dtype) = case
        is_slow = kind == "backend" and i % 2 != j and not torch.cuda.is_available()
        marks: Any = pytest.mark.slow if is_slow else ()
        yield pytest.param(kind, loop, DTYPES[dtype], marks=marks, id=f"{kind}-{loop}-{dtype}")


@pytest.mark.parametrize(("kind", "loop", "dtype"), list(cases()))
def test_loop(kind: str, loop: str, dtype: torch.dtype, device: str) -> None:
    if (loop, dtype, device) == ("GradScaler", torch.bfloat16, "cuda"):
        pytest.skip("a GradScaler takes no gradients in bfloat16")
    check_training(LOOPS[loop], kind, device, dtype)


@of_dtypes
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@of_kinds
def test_checkpointing(kind: str, reentrant: bool, dtype: torch.dtype, device: str) -> None:
    """Several blocks, each computed again in the backward."""
    around = functools.partial(checkpoint, use_reentrant=reentrant)
    check_training(plain, kind, device, dtype, around=around)


@of_dtypes
@of_kinds
@pytest.mark.slow
def test_inductor(kind: str, dtype: torch.dtype, device: str) -> None:
    options = {"options": {"small": True}} if kind == "backend" else {"backend": "inductor"}
    check_training(plain, kind, device, dtype, **options)


@of_dtypes
@of_kinds
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_reduce_overhead(kind: str, dtype: torch.dtype, device: str) -> None:
    """Graphs of CUDA, recorded and replayed, in training and in evaluation between the steps."""
    options: dict[str, Any] = {"backend": "inductor", "mode": "reduce-overhead"}
    if kind == "backend":
        options = {"options": {"triton.cudagraphs": True}}
    check_training(plain, kind, device, dtype, **options)
