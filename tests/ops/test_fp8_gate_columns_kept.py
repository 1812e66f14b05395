"""What is kept of a gate in FP8 whose hidden columns have powers of two, and for how long."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fp8_bounds import BF16, M, matrix
from fp8_columns import K, N, folds, gated, made_of, spread, without_columns
from torch import Tensor, nn

import fused_norm as fn
from fused_norm.freeze import freeze_parameters

pytestmark = pytest.mark.usefixtures("no_grad")

NAMES = ["layer_norm_weight", "layer_norm_bias", "fc1_bias", "fc1_weight", "fc2_weight"]


WAYS = ["unfreeze", "train", "load", "data", "again"]


def cases() -> Iterator[Any]:
    """Give names, ways and whether values leave; every other of these is slow: pairs are tried."""
    for (i, name), (j, way), offload in itertools.product(
        enumerate(NAMES), enumerate(WAYS), (False, True)
    ):
        marks: Any = pytest.mark.slow if (i + j + offload) % 2 else ()
        yield pytest.param(name, way, offload, marks=marks)


@pytest.mark.parametrize(("name", "way", "offload"), list(cases()))
def test_nothing_is_stale(name: str, way: str, offload: bool) -> None:
    """Whatever ends freezing ends what was made, and new memory has none of it."""
    mlp, x = fn.freeze(gated("LayerNorm"), offload=offload), matrix(M, K)
    original = copy.deepcopy(gated("LayerNorm")).state_dict()
    before = mlp(x)
    values = original[name].roll(1, 0) * 4
    if way == "unfreeze":
        fn.unfreeze(mlp)
        getattr(mlp, name).copy_(values)
    elif way == "train":
        mlp.train().eval()
        getattr(mlp, name).copy_(values)
    elif way == "load":
        mlp.load_state_dict({**original, name: values})
    elif way == "data":
        getattr(mlp, name).data = values
        if not offload:
            other = gated("LayerNorm")
            getattr(other, name).copy_(values)
            assert torch.equal(mlp(x), other(x))
    else:
        fn.freeze(mlp)
        getattr(mlp, name).copy_(values)
    fn.freeze(mlp, offload=offload)
    with folds() as used:
        found = mlp(x)
    assert used[0]
    assert not torch.equal(found, before)
    other = gated("LayerNorm")
    getattr(other, name).copy_(values)
    assert torch.equal(fn.freeze(other)(x), found)


def test_weights_that_are_quantized_again() -> None:
    """Factors belong to the weights in 8 bits that they are of, which another record may keep."""
    mlp, x = gated("LayerNorm"), matrix(M, K)
    expected = fn.freeze(mlp)(x)
    fn.unfreeze(mlp)
    of_weight = freeze_parameters([mlp.fc1_weight])
    of_all = freeze_parameters(mlp.parameters())
    with folds() as used:
        assert torch.equal(mlp(x), expected)
        # A write that goes unnoticed.
        mlp.fc1_weight.mul_(64)
        assert torch.equal(mlp(x), expected)
        of_weight.thaw()
        found = mlp(x)
    assert used[1] == used[0]
    assert used[2] is not None
    assert used[2] > used[0]  # type: ignore[operator]
    of_all.thaw()
    assert torch.equal(fn.freeze(mlp)(x), found)


def test_a_second_weight_of_several_layers() -> None:
    """Each multiplies by its own version: with these factors, others, or none."""
    x, z = matrix(M, K), matrix(M, N, seed=1)
    first, second = gated(), gated(change=spread(0.9))
    second.fc2_weight = first.fc2_weight
    for mlp in (first, second):
        for name in ("fc1_weight", "fc1_bias"):
            getattr(mlp, name).requires_grad_(False)
    plain = fn.linear_add(z, first.fc2_weight, None, x, recipe="rowwise")[0]
    alone = [fn.freeze(copy.deepcopy(mlp))(x) for mlp in (first, second)]
    assert not torch.equal(*alone)
    both = nn.ModuleList([first, second]).eval()
    for offload in (False, True):
        fn.freeze(both, offload=offload)
        for _ in range(2):
            found = [mlp(x) for mlp in both]
            other, _ = fn.linear_add(z, first.fc2_weight, None, x, recipe="rowwise")
            assert torch.equal(other, plain)
            if not offload:
                assert all(map(torch.equal, found, alone))
        # Otherwise it is shared, and nothing is kept.
        kept = [] if offload else ["fp8", "fp8 in columns", "fp8 in columns"]
        assert made_of(first.fc2_weight) == kept
        fn.unfreeze(both)


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_offloaded(activation: str) -> None:
    """The second weight leaves for the version that is used, which is the only one."""
    x, mlp = matrix(M, K), gated("LayerNorm", activation=activation)
    state = copy.deepcopy(mlp.state_dict())
    expected = fn.freeze(copy.deepcopy(mlp))(x)
    fn.freeze(mlp, offload=True)
    with folds() as used:
        assert all(torch.equal(mlp(rows), expected[: len(rows)]) for rows in (x, x))
        few = mlp(x[:20])
    assert len(set(used)) == 2
    assert mlp.fc2_weight.isnan().all()
    assert made_of(mlp.fc2_weight) == ["fp8 in columns"]
    again = copy.deepcopy(mlp)
    assert not torch.equal(mlp(x), expected)
    for other in (mlp, again):
        assert all(torch.equal(v, state[name]) for name, v in other.state_dict().items())
        assert torch.equal(fn.freeze(other, offload=True)(x[:20]), few)
        assert torch.equal(other(x), expected)


def test_offloaded_once_it_was_used_without_factors() -> None:
    """What has been made of the second weight is all that is left of it on the device."""
    x, mlp = matrix(M, K), gated()
    expected = mlp(x)
    fn.freeze(mlp, offload=True)
    assert torch.equal(without_columns(mlp, x), expected)
    with folds() as used:
        assert all(torch.equal(mlp(x), expected) for _ in range(2))
    assert used == [None, None]


def test_offloaded_and_used_without_factors() -> None:
    """As under autocast: the second weight's values come from the host, for each call."""
    x, mlp = matrix(M, K), gated()
    with torch.autocast("cpu", BF16):
        expected = fn.freeze(mlp)(x)
    fn.freeze(mlp, offload=True)
    found = mlp(x)
    for _ in range(2):
        with torch.autocast("cpu", BF16):
            assert torch.equal(mlp(x), expected)
        assert torch.equal(mlp(x), found)
        assert made_of(mlp.fc2_weight) == ["fp8 in columns"]
        assert mlp.fc2_weight.isnan().all()
    assert not torch.equal(found, expected)


def test_threads_that_share_an_offloaded_model() -> None:
    """None reads the placeholder of a weight that another has just moved."""
    mlp, x = gated(), matrix(M, K)
    expected = fn.freeze(mlp)(x)
    threads, interval = 4, sys.getswitchinterval()
    start = threading.Barrier(threads)

    def run(_: int) -> Tensor:
        start.wait()
        with torch.no_grad():
            return mlp(x)

    try:
        # As if each instruction of Python were another thread's turn.
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(10):
                fn.freeze(mlp, offload=True)
                assert all(torch.equal(y, expected) for y in pool.map(run, range(threads)))
    finally:
        sys.setswitchinterval(interval)


def test_state_and_copies() -> None:
    """Parameters keep their values; a copy is not frozen."""
    mlp, x = gated("LayerNorm"), matrix(M, K)
    state, unfrozen = copy.deepcopy(mlp.state_dict()), mlp(x)
    found = fn.freeze(mlp)(x)
    assert all(torch.equal(v, state[name]) for name, v in mlp.state_dict().items())
    assert torch.equal(copy.deepcopy(mlp)(x), unfrozen)
    assert torch.equal(fn.freeze(copy.deepcopy(mlp))(x), found)
    assert torch.equal(mlp(x), found)
    assert torch.equal(fn.unfreeze(mlp)(x), unfrozen)
