"""Trains a block of LLaMA's kind on several GPUs, tensor parallel, fused and not.

    python scripts/measure/tensor_parallel.py --json benchmarks/results/h200-tensor-parallel.json

The model is PyTorch's modules under `parallelize_module`: columns of q, k, v, gate and up and rows
of the other two on each device, the tokens of norms and sums split (`SequenceParallel`). Eager,
torch.compile and this library's backend start from the same parameters and see the same data. Each
trains alone for some steps of SGD, and its losses are held to those of the block in float32 on one
device; then their steps are timed, interleaved.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn

from benchmarks.case import dtype_name
from benchmarks.environment import describe
from fused_norm.models import Site, backend

PROVIDERS = ("eager", "compile", "fused_norm")
# Batch, tokens, width, hidden size, heads of queries, heads of keys and values.
SIZES = {"tiny": (2, 16, 64, 96, 4, 2), "large": (4, 2048, 4096, 14336, 32, 8)}
# A loss may be this much farther from that in float32 than eager's, or off by rounding alone.
MOST_ERROR, LEAST_ERROR = 2.0, 1e-3


class Block(nn.Module):
    """A block of a LLaMA without its rotary embeddings, in PyTorch's modules."""

    def __init__(self, width: int, hidden: int, heads: int, shared: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        linear = functools.partial(nn.Linear, bias=False)
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = (linear(width, shared * self.head) for _ in range(2))
        self.gate, self.up = linear(width, hidden), linear(width, hidden)
        self.down = linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of x's shape."""
        z = self.norm1(x)
        q, k, v = (
            y.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for y in (self.q(z), self.k(z), self.v(z))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        z = self.norm2(x)
        y: Tensor = x + self.down(F.silu(self.gate(z)) * self.up(z))
        return y


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes, and return 1 if a loss was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int, default=10, help="of training, before the timing")
    parser.add_argument("--rounds", type=int, default=30, help="of timed steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--then", default="inductor", help="what follows this library's pass")
    parser.add_argument("--commit", help="where there is no checkout to ask")
    options = parser.parse_args(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    spawn(_work, (options,), nprocs=options.devices)
    run = json.loads(options.json.read_text())
    print("\n".join(_lines(run)))
    return int(any(result["status"] != "ok" for result in run["results"].values()))


def _work(rank: int, options: argparse.Namespace) -> None:
    is_gpu = options.device == "cuda"
    device = torch.device(options.device, rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    kind = "nccl" if is_gpu else "gloo"
    dist.init_process_group(kind, rank=rank, world_size=options.devices)
    mesh = init_device_mesh(options.device, (options.devices,))
    batch, tokens, *sizes = SIZES[options.size]
    torch.manual_seed(0)
    dtype = torch.bfloat16
    # float32 starts from the same rounded parameters.
    model = Block(*sizes).to(device, dtype)
    data = torch.randn(batch, tokens, sizes[0], device=device).to(dtype)
    target = torch.randn(batch, tokens, sizes[0], device=device).to(dtype)
    exact = _Trained(copy.deepcopy(model).float(), None, data.float(), target.float())
    expected = [exact.step() for _ in range(options.steps)]
    del exact
    sites: list[Site] = []
    providers = {
        p: _Trained(_provided(p, model, options, sites, mesh), mesh, data, target)
        for p in PROVIDERS
    }
    results: dict[str, Any] = {}
    for name, provider in providers.items():
        losses = [provider.step() for _ in range(options.steps)]
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        eager = results["eager"]["loss error"] if results else error
        is_right = error <= max(MOST_ERROR * eager, LEAST_ERROR)
        status = "ok" if is_right else "wrong"
        results[name] = {"status": status, "losses": losses, "loss error": error}
    times: dict[str, list[float]] = {name: [] for name in providers}
    for round_ in range(options.rounds):
        # Another order each round, the same one on all devices.
        for place in range(len(providers)):
            name = list(providers)[(place + round_) % len(providers)]
            _wait(is_gpu)
            start = time.perf_counter()
            providers[name].step()
            _wait(is_gpu)
            times[name].append(time.perf_counter() - start)
    for name, found in times.items():
        results[name] |= {"milliseconds": statistics.median(found) * 1e3, "rounds": len(found)}
    if rank == 0:
        environment = dataclasses.asdict(describe(device, options.commit))
        command = ["python scripts/measure/tensor_parallel.py", *sys.argv[1:]]
        environment["command"] = " ".join(command)
        fused = [site.calls if site.fused else site.reason for site in sites]
        run = {
            **{"environment": environment, "devices": options.devices, "dtype": dtype_name(dtype)},
            **{"batch": batch, "tokens": tokens, "width": sizes[0], "hidden": sizes[1]},
            **{"norms": fused, "expected losses": expected, "results": results},
        }
        options.json.write_text(json.dumps(run, indent=1) + "\n")
    dist.destroy_process_group()


def _wait(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()
    dist.barrier()


class _Trained:
    """A model, its optimizer and this device's tokens."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh | None, data: Tensor, target: Tensor
    ) -> None:
        self.model = model
        self.devices = 1
        if mesh is not None:
            self.devices = mesh.size()
            mine = mesh.get_local_rank()
            data, target = (t.chunk(self.devices, 1)[mine].contiguous() for t in (data, target))
        self.data, self.target = data, target
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(self) -> float:
        """Train once, and return the loss over all tokens."""
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(self.data).float(), self.target.float()) / self.devices
        loss.backward()
        self.optimizer.step()
        whole = loss.detach().clone()
        if self.devices > 1:
            dist.all_reduce(whole)
        return whole.item()


def _provided(
    name: str, model: nn.Module, options: argparse.Namespace, sites: list[Site], mesh: DeviceMesh
) -> nn.Module:
    own = copy.deepcopy(model)
    columns = {n: ColwiseParallel(input_layouts=Shard(1)) for n in ("q", "k", "v", "gate", "up")}
    rows = {n: RowwiseParallel(output_layouts=Shard(1)) for n in ("o", "down")}
    norms = {n: SequenceParallel() for n in ("norm1", "norm2")}
    parallelize_module(own, mesh, {**columns, **rows, **norms})
    if name == "compile":
        own.compile()
    elif name == "fused_norm":
        ours: Any = functools.partial(backend, options={"then": options.then}, sites=sites)
        own.compile(backend=ours)
    return own


def _lines(run: dict[str, Any]) -> list[str]:
    shape = f"{run['batch']} x {run['tokens']}, {run['width']}, {run['hidden']}"
    lines = [f"{run['devices']} devices, {shape}, {run['dtype']}; norms: {run['norms']}"]
    eager = run["results"]["eager"]["milliseconds"]
    for name, result in run["results"].items():
        took, error = result["milliseconds"], result["loss error"]
        lines.append(
            f"{name}: {result['status']}, {took:.2f} ms a step ({took / eager:.2f} of eager), last "
            f"loss {result['losses'][-1]:.6f} (float32 {run['expected losses'][-1]:.6f}, "
            f"at most {error:.1e} off)"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
