"""Five steps in FP8 of two processes, each with half of the batch, against one with all of it.

The one process takes the same micro-batches one after another and adds their gradients, so that
scales of columns and of tensors are the same: nothing but the order of sums differs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import FP8
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fused_norm as fn
from fused_norm.models import precision

STEPS, WIDTH, ROWS = 5, 32, 48


class Layers(nn.Module):
    """A norm with three layers and an MLP, by the library's modules."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        parts = {"query": WIDTH, "key": WIDTH, "value": WIDTH}
        options: Any = {"normalization": "RMSNorm", "bias": False, "recipe": recipe}
        self.qkv = fn.LayerNormLinear(WIDTH, 3 * WIDTH, parameters_split=parts, **options)
        self.mlp = fn.LayerNormMLP(WIDTH, 2 * WIDTH, activation="gelu", **options)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.tanh(q) * torch.sigmoid(k) + v
        return self.mlp(x, x)


class Plain(nn.Module):
    """The same by PyTorch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        x = x + torch.tanh(self.q(z)) * torch.sigmoid(self.k(z)) + self.v(z)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Model(nn.Module):
    """Two blocks, computed again in the backward where a checkpoint is asked for."""

    def __init__(self, block: Callable[[], nn.Module], reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": sharded,
}
REENTRANT = {"checkpoint": False, "reentrant checkpoint": True}


@contextmanager
def holding_back(model: nn.Module, holds: bool) -> Iterator[None]:
    """Leave gradients to the process itself, as for all micro-batches but the last."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync() if holds else nullcontext():
            yield
        return
    model.set_requires_gradient_sync(not holds)
    yield


def check(recipe: str, wrap: str, mode: str, mesh: DeviceMesh) -> None:
    """Train both, and compare the parameters after every step."""
    torch.manual_seed(11)
    of_layers = functools.partial(Layers, recipe)
    block = Plain if mode == "backend" else of_layers
    alone = Model(block).double()
    inner = Model(block, REENTRANT.get(mode)).double()
    inner.load_state_dict(alone.state_dict())
    model = WRAPS[wrap](inner)
    call: Callable[[Tensor], Tensor] = model
    by_one: Callable[[Tensor], Tensor] = alone
    if mode == "compiled":
        call = torch.compile(model, backend="aot_eager")
    elif mode == "backend":
        precision.SMALLEST = 16
        options = {"then": "aot_eager", "fp8": recipe}
        call, by_one = (
            torch.compile(each, backend="fused_norm", options=options) for each in (model, alone)
        )
    of_each = 2 if mode == "accumulation" else 1
    optimizers = [torch.optim.SGD(each.parameters(), 0.5, 0.9) for each in (model, alone)]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(ROWS, WIDTH, generator=generator).double() for _ in range(2))
        batches = list(zip(x.chunk(2 * of_each), y.chunk(2 * of_each), strict=True))
        own = batches[dist.get_rank() * of_each :][:of_each]
        for i, (rows, target) in enumerate(own):
            with holding_back(model, i + 1 < len(own)):
                found = call(rows.clone().requires_grad_())
                (F.mse_loss(found, target) / of_each).backward()
        for rows, target in batches:
            (F.mse_loss(by_one(rows), target) / len(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected = dict(alone.named_parameters())
        for name, p in inner.named_parameters():
            value = p.full_tensor() if isinstance(p, DTensor) else p
            torch.testing.assert_close(
                value.detach(), expected[name].detach(), rtol=1e-6, atol=1e-7, msg=f"{step} {name}"
            )
    # It is in FP8: in float64 results would be others.
    exact = Model(functools.partial(Layers, None)) if block is of_layers else copy.deepcopy(alone)
    exact.double().load_state_dict(alone.state_dict())
    with torch.no_grad():
        error = (exact(x) - by_one(x)).norm() / by_one(x).norm()
    assert 1e-3 < error < 0.2, error


def cases() -> dict[str, Callable[[DeviceMesh], None]]:
    """Return what to run by the names of distributed_cases.FP8."""
    return {name: functools.partial(check, *name.split("; ")[1:]) for name in FP8}
