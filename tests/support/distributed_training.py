"""Twenty steps of DDP and FSDP2 in two processes, each with half of the batch, against PyTorch's.

Each way of the net that training loops train is wrapped, and held against one process that trains
the same by PyTorch's modules with the whole batch: evaluations between steps, and parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, subject


def sharded(module: nn.Module) -> nn.Module:
    for layer in module.children():
        fully_shard(layer)
    return fully_shard(module)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": sharded,
}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(wrap: str, kind: str, mesh: DeviceMesh) -> None:
    """Train both, and compare after every step."""
    ours, alone = (subject(each, "cpu", torch.float64) for each in (kind, "plain"))
    model = WRAPS[wrap](ours.module)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-4, fused=True)
        for each in (model, alone.module)
    ]
    # FSDP2 wraps in place, and what was compiled before calls its hooks; DDP is a module around.
    calls = [ours.call if wrap == "FSDP2" else model, alone.call]
    if kind == "backend" and wrap == "DDP":
        ours.module.compile(backend="fused_norm", options={"then": "eager"})
    for step in range(STEPS):
        x, y = ours.data.batch(step)
        parts = [t.chunk(2)[dist.get_rank()] for t in (x, y)]
        for call, batch, optimizer in zip(calls, (parts, (x, y)), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(call(batch[0]), batch[1]).backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(2):
                found, wanted = (call(ours.data.batch(-1)[0]) for call in calls)
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    own = dict(alone.module.named_parameters())
    for name, mine in ours.names.items():
        value = whole(dict(ours.module.named_parameters())[mine].detach())
        torch.testing.assert_close(value, own[name].detach(), rtol=1e-9, atol=1e-9)


def cases() -> dict[str, Callable[[DeviceMesh], None]]:
    """Return what to run by the names of distributed_cases.TRAINING."""
    from distributed_cases import TRAINING

    return {name: functools.partial(check, *name.split("; ")[1:]) for name in TRAINING}
