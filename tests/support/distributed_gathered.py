"""torchao's `enable_fsdp_float8_all_gather` in two processes: our steps against torchao's.

FSDP2 gathers weights in 8 bits, frees them after the forward, and gathers them again for the
backward. Both models see the same batches and have weights of their own, which they update.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import GATHERED
from distributed_fp8 import REENTRANT, Model, holding_back
from float8_models import Block, decibels
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

from fused_norm.models import Site, backend, precision

STEPS, WIDTH, ROWS = 4, 64, 32
# Of a block: what is gathered in 8 bits, and what is not, which norms and biases have.
WEIGHTS, OTHERS = 8 * WIDTH * WIDTH, 7 * WIDTH


def trained(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Convert a model and shard it, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def events_of(step: Callable[[], Any]) -> dict[str, list[Any]]:
    """Return what ran in a step, by its name: the shapes of what each was given."""
    with profile(record_shapes=True) as recorded:
        step()
    found: dict[str, list[Any]] = {}
    for event in recorded.events():
        found.setdefault(event.name, []).append(event.input_shapes)
    return found


def check(mode: str, mesh: DeviceMesh) -> None:
    """Train both, hold losses and gradients against each other, then start from the same weights.

    Products differ in their last bits, by which some numbers of 8 bits become their neighbors.
    That leaves 30 dB of a gradient or more; weights of the step before would leave 10.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precision.SMALLEST = 16
    torch.manual_seed(11)
    is_narrow = mode == "bfloat16"
    theirs = Model(functools.partial(Block, WIDTH), REENTRANT.get(mode))
    ours = copy.deepcopy(theirs)
    models = [trained(each, torch.bfloat16 if is_narrow else None) for each in (ours, theirs)]
    sites: list[Site] = []
    then = "aot_eager" if mode == "whole" else "eager"
    how = functools.partial(backend, options={"then": then}, sites=sites)
    for module in (ours,) if mode == "whole" else ours.blocks:
        module.compile(backend=how)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5, 0.9) for each in models]
    parts = 2 if mode == "accumulation" else 1

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for i, (rows, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            with holding_back(model, i + 1 < parts):
                loss = F.mse_loss(model(rows).float(), target) / parts
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    found, losses = list[float](), list[tuple[Tensor, Tensor]]()
    for step in range(STEPS):
        torch.manual_seed(2 * step + dist.get_rank())
        x, y = torch.randn(2, ROWS, WIDTH)
        losses.append((backward(ours, x, y), backward(theirs, x, y)))
        pairs = list(zip(ours.named_parameters(), theirs.parameters(), strict=True))
        for (name, mine), other in pairs:
            assert mine.grad is not None, name
            found.append(decibels(mine.grad.to_local(), other.grad.to_local()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for (_, mine), other in pairs:
                mine.copy_(other)
            for each in models if mode != "maxima" else ():
                precompute_float8_dynamic_scale_for_fsdp(each)
            found.append(decibels(*(each(x) for each in models)))
    ran = events_of(lambda: backward(ours, x, y))
    # Only now: the other process would wait forever for one that fails.
    for mine, other in losses:
        torch.testing.assert_close(mine, other, rtol=3e-3, atol=0)
    assert min(found) > (16 if is_narrow else 25), found
    assert statistics.median(found) > (20 if is_narrow else 90), found
    calls = [site.calls for site in sites if site.fused]
    assert calls[:3] == [["norm_linear: 1 Linear"], ["norm_mlp: residual, gelu"], ["linear"]], sites
    assert all(site.implementation == "FP8 tensorwise" for site in sites), sites
    assert {"fused_norm::fp8_layers", "fused_norm::fp8_layers_backward"} <= ran.keys(), ran.keys()
    assert not [name for name in ran if "matmul_with_hp_or_float8" in name]
    # In bytes, of both processes: weights in 8 bits take one each.
    size = WEIGHTS + OTHERS * (2 if is_narrow else 4)
    gathered = [shapes[1] for shapes in ran["fsdp::all_gather_copy_in"]]
    assert gathered
    assert all(shape == [size] for shape in gathered), (gathered, size)


def cases() -> dict[str, Callable[[DeviceMesh], None]]:
    """Return what to run by the names of distributed_cases.GATHERED."""
    return {name: functools.partial(check, name.split("; ")[1]) for name in GATHERED}
