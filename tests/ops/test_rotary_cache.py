"""Queries that are rotated, and keys and values that the same call stores in caches."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import pytest
import torch
from devices import GPU
from processes import run_python
from test_rotary import DTYPES, SIZES
from test_rotary_of_both import HEADS, Both
from torch import Tensor

from fused_norm.chain import rotary as kernels
from fused_norm.ops import rotary
from fused_norm.ops.rotary_cache import OP
from fused_norm.rotation import Caches, Heads, Rotation

S = 9


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def caches_like(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return caches that are parts of larger ones, with other strides each."""
    B, _, H, D = x.shape
    one = torch.randn(B + 1, H, S + 2, D, dtype=x.dtype, device=x.device)[1:, :, 1:-1]
    other = torch.randn(B, S, H + 1, D, dtype=x.dtype, device=x.device)[:, :, 1:].transpose(1, 2)
    return one, other


def expected(
    two: list[Heads], third: Tensor, into: Caches, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries and both caches, by a call on two tensors and a copy of each token.

    On GPUs, `index_copy_` with deterministic algorithms writes other elements if there is one head.
    """
    seconds, thirds = into.seconds.clone(), into.thirds.clone()
    y, stored = rotary.call_both(two[0], two[1], rotation)
    for token, slot in enumerate(into.slots.tolist()):
        seconds[:, :, slot] = stored[:, token]
        thirds[:, :, slot] = third[:, token]
    return y, seconds, thirds


def run(two: list[Heads], third: Tensor, into: Caches, rotation: Rotation) -> Tensor:
    t, second = two
    y: Tensor = OP(*t[:2], *second[:2], third, *t[2:], *into, *rotation)
    return y


def all_of(cache: Tensor) -> Tensor:
    """Return the memory that a cache is a part of."""
    return cache.new_empty(0).set_(cache.untyped_storage())


def check(two: list[Heads], third: Tensor, into: Caches, rotation: Rotation) -> None:
    """Hold a call to the bits of PyTorch's writes, and what surrounds the caches to what it was."""
    wanted = expected(two, third, into, rotation)
    around = [all_of(cache).clone() for cache in into[:2]]
    places = [torch.full_like(memory, False, dtype=torch.bool) for memory in around]
    for cache, place in zip(into[:2], places, strict=True):
        inside = place.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        inside.index_fill_(2, into.slots, True)
    y = run(two, third, into, rotation)
    for mine, other in zip((y, *into[:2]), wanted, strict=True):
        assert torch.equal(mine, other), rotation
    for cache, before, place in zip(into[:2], around, places, strict=True):
        assert torch.equal(all_of(cache)[~place], before[~place])


def three(both: Both, rotation: Rotation, size: int, of_gamma: Any, packed: bool) -> Any:
    """Return both tensors of a call and a third one, of the same rows if packed."""
    xs = both.packed if packed else both.dense
    third = torch.randn_like(both.dense[1])
    if packed:
        rows = torch.empty(*third.shape[:2], 2 * third.shape[2], both.D, dtype=both.dtype)
        third = rows.to(third.device)[:, :, third.shape[2] :].copy_(third)
    return both.calls(xs, rotation, size, of_gamma), third


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "size"), SIZES)
def test_bits_are_those_of_two_calls_and_copies(
    device: str, dtype: torch.dtype, D: int, size: int
) -> None:
    if device == "cuda" and dtype is torch.float64 and D > 128:
        pytest.skip("a head longer than what a warp has in registers is PyTorch's")
    slots = torch.tensor([8, 0, 3, 7, 1, 2, 5], device=device)
    norms = (None, dtype, torch.float32) if dtype.itemsize < 4 else (None, dtype)
    forms = itertools.product(norms, (False, True), (False, True), (False, True))
    for heads, (of_gamma, interleaved, half, packed) in zip(itertools.cycle(HEADS), forms):
        if not size and (interleaved or half or of_gamma is None):
            continue
        both = Both(heads, D, dtype, device)
        rotation = Rotation(of_gamma is not None, 1e-6, 0.5, interleaved, half)
        two, third = three(both, rotation, size, of_gamma, packed)
        into = Caches(*caches_like(third), slots)
        assert kernels.serves_caches(two[0], two[1], third, into, rotation)
        check(two, third, into, rotation)


@pytest.mark.parametrize("batch", [1, 16, 300])
def test_one_token_of_each_sequence(device: str, batch: int) -> None:
    cos, sin = torch.rand(2, 1, 64, device=device)
    q, k, v = (torch.randn(batch, 1, n, 64, device=device).bfloat16() for n in (32, 8, 8))
    two = [Heads(q, None, cos, sin), Heads(k, None, cos, sin)]
    for slot in (0, S - 1):
        into = Caches(*caches_like(v), torch.tensor([slot], device=device))
        assert kernels.serves_caches(two[0], two[1], v, into, Rotation())
        check(two, v, into, Rotation())


def of_kind(change: str, device: str = "cpu") -> tuple[list[Heads], Tensor, Caches]:
    """Return a call, and with a change one that no kernel computes."""
    cos, sin = torch.rand(2, 3, 64, device=device)
    q, k, v = (torch.randn(2, 3, n, 64, device=device) for n in (4, 2, 2))
    caches = [torch.randn(2, 2, S, 64, device=device) for _ in range(2)]
    slots = torch.tensor([4, 1, 8], device=device)
    if change == "strided slots":
        slots = slots.repeat_interleave(2)[::2]
    elif change == "strided elements":
        caches[0] = caches[0].transpose(2, 3).contiguous().transpose(2, 3)
    elif change == "strided values":
        v = v.transpose(2, 3).contiguous().transpose(2, 3)
    return [Heads(q, None, cos, sin), Heads(k, None, cos, sin)], v, Caches(*caches, slots)


@pytest.mark.parametrize("change", ["", "strided slots", "strided elements", "strided values"])
def test_layouts_without_a_kernel(device: str, change: str) -> None:
    two, third, into = of_kind(change, device)
    served = kernels.serves_caches(two[0], two[1], third, into, Rotation())
    assert served == (change in ("", "strided values"))
    check(two, third, into, Rotation())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"slots": torch.tensor([0, 1, S])}, "index"),
        ({"slots": torch.tensor([0, 1, -1])}, "index"),
        ({"slots": torch.tensor([0, 1])}, "index"),
        ({"slots": torch.tensor([0.0, 1, 2])}, "long"),
        ({"thirds": torch.zeros(2, 2, S, 64, dtype=torch.float64)}, "same dtype"),
        ({"thirds": torch.zeros(2, 3, S, 64)}, "same slice shapes"),
        ({"seconds": torch.zeros(2, 2, 1, 64).expand(2, 2, S, 64)}, "more than one element"),
    ],
    ids=["beyond", "negative", "few", "floats", "dtype", "heads", "expanded"],
)
def test_errors_are_pytorchs(change: dict[str, Tensor], error: str) -> None:
    two, third, into = of_kind("")
    with pytest.raises((RuntimeError, IndexError), match=error):
        run(two, third, into._replace(**change), Rotation())


# A program of its own: no kernel runs after one that fails.
BEYOND = """
import torch
import test_rotary_cache as t
two, third, into = t.of_kind("", "cuda")
slots = torch.tensor([0, 1, {slot}], device="cuda")
torch.cuda.synchronize()
t.run(two, third, into._replace(slots=slots), t.Rotation())
print("launched")
torch.cuda.synchronize()
print("written")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("slot", [S, -1])
def test_a_slot_that_a_cache_lacks_is_an_error_on_a_gpu(slot: int) -> None:
    """As of PyTorch's op, an error of the device: nothing around the cache is written."""
    done = run_python("-c", BEYOND.format(slot=slot), PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode != 0
    assert done.stdout.split() == ["launched"]
    assert "CUDA error" in done.stderr


def test_autograd_sees_a_cache_change(device: str) -> None:
    two, third, into = of_kind("", device)
    x = torch.ones_like(into.seconds, requires_grad=True)
    y = (x * into.seconds).sum()
    run(two, third, into, Rotation())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        two, third, into = of_kind("", device)
        check(two, third, into, Rotation())


def test_pytorchs_rules_for_ops(device: str) -> None:
    (t, second), third, into = of_kind("", device)
    arguments = (*t[:2], *second[:2], third, *t[2:], *into, *Rotation())
    torch.library.opcheck(OP, arguments)


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_one_kernel_is_launched(device: str) -> None:
    two, third, into = of_kind("", device)
    run(two, third, into, Rotation())
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as log:
        run(two, third, into, Rotation())
        torch.cuda.synchronize()
    kinds = [e.key for e in log.key_averages() if e.self_device_time_total]
    # New memory, for the queries, is filled.
    launched = [kind for kind in kinds if "FillFunctor" not in kind]
    assert len(launched) == 1
    assert "rotary" in launched[0]
