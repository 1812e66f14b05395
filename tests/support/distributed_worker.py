"""What two processes do together: python tests/support/distributed_worker.py FOLDER [NAMES]

Each writes a file RANK.jsonl to the folder, with a line for each case: its name, and "" or what
went wrong.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import distributed_context
import distributed_fp8
import distributed_gathered
import distributed_training
import family
import pytest
import torch

# Each child would import it when it first compiles.
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.nn.functional as F
from compiling import with_sites
from distributed_cases import BACKEND, LAYOUTS, MEMBER_CASES, MEMBERS, NAMES, TENSOR_PARALLEL
from guards import time_no_guards
from processes import in_forks
from strategies import pass_failed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fused_norm as fn
from fused_norm import composition
from fused_norm.models import fuse
from fused_norm.ops import norm_linear as ops_norm_linear

CASES: dict[str, Callable[[DeviceMesh], None]] = {}
PLACES = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1), "S(2)": Shard(2)}


def case(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CASES[function.__name__] = function
    return function


def distributed(name: str, tensor: Tensor, mesh: DeviceMesh, x: Any, weight: Any) -> DTensor:
    """Return a leaf as a model in parallel has it."""
    where = Replicate()
    if name in ("x", "residual", "residual_out"):
        where = x
    elif name.startswith("weight") or (name.startswith("bias") and weight == Shard(0)):
        where = weight
    elif name == "fc2_weight" and weight == Shard(0):
        where = Shard(1)
    return distribute_tensor(tensor.detach(), mesh, [where]).requires_grad_()


def gathered(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(mine: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        torch.testing.assert_close(
            gathered(mine[name]), value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def loss_of(results: list[Any]) -> Tensor:
    """Return a loss that weighs every element of the results differently."""
    total = torch.zeros((), dtype=torch.float64)
    for i, result in enumerate(results):
        values = gathered(result)
        weights = torch.arange(values.numel(), dtype=torch.float64).view(values.shape)
        total = total + (values * torch.sin(weights + i)).sum()
    return total


def run(
    function: Callable[..., Any], options: Any, tensors: dict[str, Any]
) -> dict[str, Tensor | None]:
    results = function(options, tensors)
    loss_of(results).backward()
    found = {f"result {i}": result.detach() for i, result in enumerate(results)}
    return found | {name: leaf.grad for name, leaf in family.leaves(tensors).items()}


def check_member(member: str, layout: str, mesh: DeviceMesh, compiled: bool = False) -> None:
    options, (x_place, weight_place, is_ours) = MEMBERS[member], LAYOUTS[layout]
    x, weight = PLACES[x_place], PLACES[weight_place]
    torch.manual_seed(3)
    plain = family.make_tensors(options)
    named = family.leaves(plain)
    leaves = {n: distributed(n, t, mesh, x, weight) for n, t in named.items()}
    by_id = {id(t): leaves[n] for n, t in named.items()}
    tensors = family.replaced(
        plain, lambda values: [v if v is None else by_id[id(v)] for v in values]
    )
    composed = composition.compute
    # Gates of one weight and products side by side are DTensor's own affair, like inputs sharded.
    if is_ours:
        composition.compute = None
    try:
        function = family.ours
        if compiled:
            function = torch.compile(family.ours, fullgraph=True, backend="aot_eager")
        mine = run(function, options, tensors)
    finally:
        composition.compute = composed
    assert_same(mine, run(family.eager, options, plain))


for name_ in MEMBER_CASES:
    member_, layout_, *compiled_ = name_.split("; ")
    CASES[name_] = functools.partial(check_member, member_, layout_, compiled=bool(compiled_))


class Block(nn.Module):
    """A block of LLaMA's kind, its norms by the op family or by PyTorch's modules."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.norm, self.norm2 = nn.RMSNorm(8), nn.RMSNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_fused:
            z = self.norm(x)
            x = x + self.o(self.mixed(self.q(z), self.k(z), self.v(z)))
            z = self.norm2(x)
            return x + self.down(F.silu(self.gate(z)) * self.up(z))
        weights = [self.q.weight, self.k.weight, self.v.weight]
        norm = {"normalization": "rms_norm", "eps": None}
        qkv = fn.norm_linear(x, weights, norm_weight=self.norm.weight, **norm)
        x = x + F.linear(self.mixed(*qkv), self.o.weight)
        return fn.norm_mlp(
            x,
            (self.gate.weight, self.up.weight),
            None,
            self.down.weight,
            residual_out=x,
            activation="swiglu",
            norm_weight=self.norm2.weight,
            **norm,
        )

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(q) * torch.sigmoid(k) + v


def check_tensor_parallel(place: Any, mesh: DeviceMesh, compiled: bool = False) -> None:
    """`parallelize_module` on the modules whose parameters the functions take."""
    torch.manual_seed(5)
    theirs = Block(False).double()
    mine = copy.deepcopy(theirs)
    mine.is_fused = True
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    rows = {name: RowwiseParallel() for name in ("o", "down")}
    norms = {name: SequenceParallel() for name in ("norm", "norm2")}
    parallelize_module(mine, mesh, {**columns, **rows, **norms})
    ready = PrepareModuleInput(
        input_layouts=place, desired_input_layouts=place, use_local_output=False
    )
    parallelize_module(mine, mesh, ready)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    whole, local = x.clone().requires_grad_(), x.clone()
    if place.is_shard():
        local = local.chunk(2, place.dim)[mesh.get_local_rank()].contiguous()
    local.requires_grad_()
    call = torch.compile(mine, fullgraph=True, backend="aot_eager") if compiled else mine
    y, expected = call(local), theirs(whole)
    for result in (y, expected):
        loss_of([result]).backward()
    found = {name: p.grad for name, p in mine.named_parameters()} | {"y": y.detach()}
    assert_same(found, {n: p.grad for n, p in theirs.named_parameters()} | {"y": expected.detach()})
    grad = whole.grad
    if place.is_shard():
        grad = grad.chunk(2, place.dim)[mesh.get_local_rank()]
    torch.testing.assert_close(local.grad, grad)


for name_ in TENSOR_PARALLEL:
    _, place_, *compiled_ = name_.split("; ")
    CASES[name_] = functools.partial(
        check_tensor_parallel, PLACES[place_], compiled=bool(compiled_)
    )


def check_backend(place: Any, mesh: DeviceMesh) -> None:
    """`parallelize_module` on a model of PyTorch's modules, whose norms the backend fuses."""
    torch.manual_seed(5)
    theirs = Block(False).double()
    mine = copy.deepcopy(theirs)
    columns = {n: ColwiseParallel(input_layouts=place) for n in ("q", "k", "v", "gate", "up")}
    rows = {n: RowwiseParallel(output_layouts=place) for n in ("o", "down")}
    norms = {n: SequenceParallel() for n in ("norm", "norm2")} if place.is_shard() else {}
    parallelize_module(mine, mesh, {**columns, **rows, **norms})
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    whole, local = x.clone().requires_grad_(), x.clone()
    if place.is_shard():
        local = local.chunk(2, place.dim)[mesh.get_local_rank()].contiguous()
    local.requires_grad_()
    compiled, sites = with_sites(mine, True)
    y, expected = compiled(local), theirs(whole)
    wanted = [["norm_linear: 3 Linear"], ["norm_linear: 2 Linear"]]
    assert [site.calls for site in sites] == wanted, [site.reason for site in sites]
    dy = torch.sin(torch.arange(float(x.numel()), dtype=x.dtype)).view_as(x)
    expected.backward(dy)
    if place.is_shard():
        expected, dy, grad = (
            t.chunk(2, place.dim)[mesh.get_local_rank()] for t in (expected, dy, whole.grad)
        )
    else:
        grad = whole.grad
    y.backward(dy)
    found = {name: p.grad for name, p in mine.named_parameters()} | {"y": y, "x": local.grad}
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    assert_same(found, wanted | {"y": expected, "x": grad})


for name_ in BACKEND:
    CASES[name_] = functools.partial(check_backend, PLACES[name_.split("; ")[1]])


class Model(nn.Module):
    """The modules with options, one after another."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"query": 8, "key": 4, "value": 4}
        self.first = fn.LayerNormLinear(8, 16, normalization="RMSNorm", parameters_split=parts)
        self.second = fn.LayerNormLinear(16, 16, activation="swiglu", zero_centered_gamma=True)
        self.mlp = fn.LayerNormMLP(8, 12, activation="gelu_tanh")
        self.gated = fn.LayerNormMLP(8, 12, normalization="RMSNorm", activation="geglu", bias=False)
        self.last = fn.LayerNormLinear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.second(self.first(x))
        h = self.mlp(h, h)
        return self.last(self.gated(h, h))


def check_data_parallel(wrap: Callable[[nn.Module], nn.Module], mesh: DeviceMesh) -> None:
    """Two steps, each process with half of the batch, as one process with all of it."""
    torch.manual_seed(7)
    alone = Model().double()
    model = wrap(copy.deepcopy(alone))
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    for step in range(2):
        for each, batch in ((model, x.chunk(2)[dist.get_rank()]), (alone, x)):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer.zero_grad()
            each(batch + step).square().mean().backward()
            optimizer.step()
    names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    assert_same(
        {n: p.detach() for n, p in names.items()},
        {n: p.detach() for n, p in alone.named_parameters()},
    )


def shard_fully(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


CASES |= distributed_training.cases() | distributed_fp8.cases() | distributed_context.cases()
CASES |= distributed_gathered.cases()
CASES["DDP"] = functools.partial(check_data_parallel, DistributedDataParallel)
CASES["FSDP2"] = functools.partial(check_data_parallel, shard_fully)


@case
def linear_add(mesh: DeviceMesh) -> None:
    """A product by inputs, whose summands the sum of the residual adds up."""
    leaves = [
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((2, 4, 6), (8, 6), (8,), (2, 4, 8))
    ]
    places = [Shard(2), Shard(1), Replicate(), Shard(1)]
    mine = [
        distribute_tensor(v.detach(), mesh, [p]).requires_grad_()
        for v, p in zip(leaves, places, strict=True)
    ]
    for each in (mine, leaves):
        total, statistics = fn.linear_add(*each)
        y = fn.norm_linear(total, each[1].T, activation="relu", statistics=statistics)
        loss_of([total, y]).backward()
    for ours, theirs in zip(mine, leaves, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@case
def mixed(mesh: DeviceMesh) -> None:
    """PyTorch's words where a DTensor meets a tensor."""
    weight = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    for call in (
        lambda: fn.norm_linear(torch.randn(3, 8), weight, normalization="rms_norm"),
        lambda: fn.fused_layernorm_linear(torch.randn(3, 8), None, None, weight),
    ):
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
            call()


def main(rank: int, folder: Path, names: list[str]) -> None:
    """Run the cases, one after another."""
    torch.set_num_threads(1)
    time_no_guards()
    # The kernels run on small tensors, too.
    ops_norm_linear.is_host_bound = lambda t: False
    fuse._say_failed = pass_failed
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # PyTorch's compiler, where it meets a DTensor that is no leaf.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    with (folder / f"{rank}.jsonl").open("w") as file:
        for name in names or NAMES:
            said = ""
            torch.manual_seed(0)
            # PyTorch's own ops on DTensors do not compile again for sizes that change.
            torch.compiler.reset()
            try:
                CASES[name](mesh)
            except Exception:
                # The test that reads this fails with it, whatever it is; the others still run.
                said = traceback.format_exc()
            print(json.dumps([name, said]), file=file, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    # Imports the compiler, once for both.
    torch.compiler.reset()
    ranks = [functools.partial(main, rank, Path(sys.argv[1]), sys.argv[2:]) for rank in range(2)]
    sys.exit(any(in_forks(ranks)))
