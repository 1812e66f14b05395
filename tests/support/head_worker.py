"""What processes that share a vocabulary do: head_worker.py FOLDER COUNT NAMES [COUNT NAMES ...]

NAMES are a list in JSON. Each of COUNT processes writes a file COUNT-RANK.jsonl to the folder, with
a line for each case: its name, and "" or what went wrong.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_kernels
import heads
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from guards import time_no_guards
from head_cases import CUDA, KERNELS, OPTIONS, VOCABULARIES
from processes import in_forks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fused_norm as fn
from fused_norm import cross_entropy
from fused_norm.call.head_record import HeadCall
from fused_norm.chain import head, head_shards_sm90, head_sm90
from fused_norm.chain.kernels import is_hopper
from fused_norm.cross_entropy import Head, Loss

M, K = 13, 8
WHERE = {"R": Replicate(), "S(0)": Shard(0)}


def placed(tensor: Tensor | None, mesh: DeviceMesh, place: Any) -> Any:
    """Return a DTensor that gradients flow through to an ordinary one."""
    if tensor is None:
        return None
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[place])


def sharded(mesh: DeviceMesh, place: str = "R", vocabulary: Any = None) -> Callable[..., Any]:
    """Return our loss and logarithms of a sharded vocabulary."""
    vocabulary = vocabulary or Shard(0)

    def function(x: Tensor, weight: Tensor, target: Tensor, bias: Any, **options: Any) -> Any:
        results = fn.linear_cross_entropy(
            placed(x, mesh, WHERE[place]),
            placed(weight, mesh, vocabulary),
            target,
            placed(bias, mesh, vocabulary),
            return_logsumexp=True,
            **options,
        )
        assert all(r.placements == (Replicate(),) for r in results)
        return tuple(r.to_local() for r in results)

    return function


def check_options(options: dict[str, Any], place: str, dtype: torch.dtype, mesh: Any) -> None:
    given, device = dict(options), mesh.device_type
    own = torch.Generator().manual_seed(1)
    V = given.pop("V", 11)
    for name, size in (("class_weight", V), ("token_weight", M)):
        if given.pop(name, False):
            given[name] = torch.rand(size, generator=own, dtype=torch.float64).to(device)
    tensors = heads.case(M, K, V, given.pop("std", 1.0), given.pop("bias", False), dtype, device)
    at_most = given.pop("at_most", 2.5)
    heads.check(tensors, 0.5, at_most=at_most, function=sharded(mesh, place), **given)


def check_leaves(mesh: DeviceMesh) -> None:
    """Gradients have the placements of their parameters; a second backward repeats them."""
    x, weight, target, bias = heads.case(M, K, 11, bias=True, dtype=torch.float64)
    exact = heads.results(heads.composed, (x, weight, target, bias))
    leaves = [
        distribute_tensor(v, mesh, [where]).requires_grad_()
        for v, where in ((x, Replicate()), (weight, Shard(0)), (bias, Shard(0)))
    ]
    labels = distribute_tensor(target, mesh, [Replicate()])
    loss = fn.linear_cross_entropy(*leaves[:2], labels, leaves[2])
    for retain in (True, False):
        found: Any = torch.autograd.grad(loss, leaves, retain_graph=retain)
        assert [g.placements[0].is_shard(0) for g in found] == [False, True, True]
        torch.testing.assert_close([g.full_tensor() for g in found], exact[2:])
        assert found[1].to_local().shape == leaves[1].to_local().shape
    loss = fn.linear_cross_entropy(*leaves[:2], labels, leaves[2])
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def check_norm(mesh: DeviceMesh) -> None:
    torch.manual_seed(2)
    gamma = torch.rand(K, dtype=torch.float64)
    x, weight, target, _ = heads.case(M, K, 11, dtype=torch.float64)

    def ours(x: Tensor, weight: Tensor, target: Tensor, *_: Any, gamma: Tensor = gamma) -> Any:
        loss = fn.norm_linear_cross_entropy(
            placed(x, mesh, Shard(0)),
            placed(weight, mesh, Shard(0)),
            target,
            normalization="rms_norm",
            norm_weight=placed(gamma, mesh, Replicate()),
        )
        return loss.to_local(), target

    def exact(x: Tensor, weight: Tensor, target: Tensor, *_: Any) -> Any:
        return heads.composed(F.rms_norm(x, (K,), gamma, 1e-5), weight, target, None)[0], target

    found, expected = (heads.results(f, (x, weight, target, None)) for f in (ours, exact))
    torch.testing.assert_close(found, expected)


def check_compiled(mesh: DeviceMesh) -> None:
    tensors = heads.case(M, K, 11, dtype=torch.float64)

    def function(x: Any, weight: Any, target: Tensor) -> Any:
        return fn.linear_cross_entropy(x, weight, target) * 2

    x, weight = (placed(v, mesh, w) for v, w in zip(tensors[:2], (Shard(0), Shard(0)), strict=True))
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found: Any = torch.autograd.grad(compiled(*leaves, tensors[2]), leaves)
    exact = heads.results(heads.composed, tensors, 2.0)
    torch.testing.assert_close([g.full_tensor() for g in found], exact[2:])


def check_other_placements(mesh: DeviceMesh) -> None:
    """A weight sharded by its inputs is DTensor's own affair; tensors of both kinds do not go."""
    tensors = heads.case(M, K, 12, dtype=torch.float64)
    x, weight, target, _ = tensors
    labels = placed(target, mesh, Replicate())
    exact = heads.results(heads.composed, tensors)
    for place in (Shard(1), Replicate()):
        leaves = [
            placed(v, mesh, p).detach().requires_grad_()
            for v, p in ((x, Replicate()), (weight, place))
        ]
        loss = fn.linear_cross_entropy(*leaves, labels)
        found: Any = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close([g.full_tensor() for g in found], exact[2:])
    split = placed(weight, mesh, Shard(0))
    for wrong in ((x, split), (placed(x, mesh, Replicate()), weight)):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            F.linear(*wrong)
        words = re.escape(str(expected.value).split("!")[0])
        with pytest.raises(expected.type, match=words):
            fn.linear_cross_entropy(*wrong, target)
    with pytest.raises(IndexError, match="Target 12 is out of bounds"):
        fn.linear_cross_entropy(placed(x, mesh, Replicate()), split, torch.full_like(target, 12))


def with_kernels(patch: pytest.MonkeyPatch) -> list[int]:
    """Replace the kernels by PyTorch's ops; return the rows that these get."""
    rows: list[int] = []

    def serves(t: Head, loss: Loss) -> bool:
        return head_sm90.can_do(loss) and len(t.weight) > 0

    def run(function: str, call: HeadCall, device: torch.device) -> None:
        if function == "exponentials":
            rows.append(call.M)
        head_kernels.run(function, call, device)

    patch.setattr(head_sm90, "serves", serves)
    patch.setattr(head_sm90, "_SAMPLES", 2)
    patch.setattr(head_sm90, "OWN_DX", True)
    for module in (head_sm90, head_shards_sm90):
        patch.setattr(module, "run", run)
    return rows


def check_on_gpu(options: dict[str, Any], place: str) -> None:
    """Without a bias, kernels serve each process with classes and options that they know."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    rows, serves = list[int](), list[bool]()
    run, asked = head_shards_sm90.run, head_sm90.serves

    def counting(function: str, call: HeadCall, device: torch.device) -> None:
        rows.append(call.M)
        run(function, call, device)

    def asking(t: Head, loss: Loss) -> bool:
        serves.append(asked(t, loss))
        if t.bias is None:
            assert serves[-1] == (is_hopper(0) and head_sm90.can_do(loss) and len(t.weight) > 0)
        return serves[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_shards_sm90, "run", counting)
        patch.setattr(head_sm90, "serves", asking)
        check_options(options, place, torch.bfloat16, mesh)
    assert serves
    assert bool(rows) == any(serves)


def check_huge(mesh: DeviceMesh) -> None:
    """A process whose classes are far below the others' has a gradient of its labels alone."""
    with pytest.MonkeyPatch.context() as patch:
        with_kernels(patch)
        x, weight, target, _ = heads.case(M, K, 301, dtype=torch.bfloat16)
        weight[7] *= 300
        target[1::2] = 300
        heads.check((x, weight, target, None), 0.5, at_most=2.5, function=sharded(mesh))


def check_kernels(mesh: DeviceMesh) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rows = with_kernels(patch)
        x, weight, target, _ = heads.case(M, K, 12, dtype=torch.bfloat16)
        heads.results(sharded(mesh), (x, weight, target, None), chunk_rows=7)
        assert rows == [7, 6]


def check_chunks(mesh: DeviceMesh) -> None:
    """Shares that differ in size, on either side of where chunks have fewer rows."""
    tensors = heads.case(M, K, 11, dtype=torch.float64)
    exact = heads.results(heads.composed, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_LEAST_ROWS", 2)
        least = 11 // dist.get_world_size()
        patch.setattr(head, "_FEW_LOGITS", M * least)
        torch.testing.assert_close(heads.results(sharded(mesh), tensors), exact)


CASES: dict[str, Callable[[DeviceMesh], None]] = {
    "leaves": check_leaves,
    "norm": check_norm,
    "compiled": check_compiled,
    "other placements": check_other_placements,
    "one huge logit": check_huge,
    "as many kernels as chunks": check_kernels,
    "as many chunks in all processes": check_chunks,
}


def run(name: str, mesh: DeviceMesh) -> None:
    if name in CASES:
        CASES[name](mesh)
        return
    options, place, dtype = name.split("; ")
    composed = cross_entropy.by_pytorch
    cross_entropy.by_pytorch = None  # type: ignore[assignment]
    try:
        given = OPTIONS | VOCABULARIES
        if dtype == CUDA:
            check_on_gpu(given[options], place)
            return
        with pytest.MonkeyPatch.context() as patch:
            if dtype == KERNELS:
                with_kernels(patch)
                dtype = "bfloat16"
            check_options(given[options], place, getattr(torch, dtype), mesh)
    finally:
        cross_entropy.by_pytorch = composed


def main(rank: int, count: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    time_no_guards()
    backend = "gloo"
    if count <= torch.cuda.device_count():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = f"file://{folder / f'store{count}'}"
    dist.init_process_group(backend, store, rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    with (folder / f"{count}-{rank}.jsonl").open("w") as file:
        for name in names:
            try:
                run(name, mesh)
                wrong = ""
            except Exception:
                # Told to the test, whatever it is; the other cases go on.
                wrong = traceback.format_exc()
            print(json.dumps([name, wrong]), file=file, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    # Imports the compiler, once for all.
    torch.compiler.reset()
    failed = False
    for count_, names_ in zip(map(int, rest[::2]), map(json.loads, rest[1::2]), strict=True):
        arguments = (count_, Path(where), names_)
        failed |= any(in_forks(functools.partial(main, r, *arguments) for r in range(count_)))
    sys.exit(failed)
