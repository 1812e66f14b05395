"""The weights that the fused way on Hopper keeps folded: made once, never out of date."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from accuracy import as_float64, assert_within_budget, eager, make_inputs
from torch import Tensor

import fused_norm as fn
from fused_norm.backends import sm90
from fused_norm.call import parameters as known_parameters
from fused_norm.call.folds import Fold
from fused_norm.call.parameters import Parameters
from fused_norm.ops.family import family_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper GPU on this machine",
    ),
]


@pytest.fixture(autouse=True, params=["C++", "Python"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls served by the compiled node, and without it."""
    if request.param == "C++":
        request.getfixturevalue("python_calls")
    else:
        monkeypatch.setattr("fused_norm.ops.compiled.module", lambda: None)
    known_parameters._kept.clear()


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of the weights that were folded."""
    made: list[int] = []
    make: Callable[..., None] = sm90._make

    def counted(fold: Fold, parameters: Parameters, *others: object) -> None:
        made.append(parameters.tensors()[2].data_ptr())
        make(fold, parameters, *others)

    monkeypatch.setattr(sm90, "_make", counted)
    return made


def kept_folds() -> list[Fold]:
    return [fold for kept in known_parameters._kept.values() for fold in kept.folds.values()]


def inputs(rows: int = 16, mean: float = 0.0) -> list[Tensor]:
    return make_inputs(rows, 256, 128, dtype=torch.bfloat16, device="cuda", mean=mean)


def check(tensors: list[Tensor]) -> Tensor:
    y = fn.fused_layernorm_linear(*tensors)
    assert_within_budget("y", y, eager(*as_float64(tensors)), eager(*tensors))
    return y


def test_kept_from_the_second_call_on(folds: list[int]) -> None:
    tensors = inputs()
    results = [check(tensors) for _ in range(4)]
    assert len(folds) == 1
    assert torch.equal(results[1], results[3])


def test_many_rows_fold_at_once(folds: list[int]) -> None:
    """In the workspace of the call: nothing is kept."""
    check(inputs(rows=5000))
    assert not folds
    assert not any(fold.tensors for fold in kept_folds())


@pytest.mark.parametrize("index", [1, 2, 3, 4], ids=["gamma", "beta", "weight", "bias"])
def test_parameter_changed_in_place(index: int, folds: list[int]) -> None:
    tensors = inputs()
    for _ in range(3):
        check(tensors)
        check(tensors)
        tensors[index].mul_(1.5).add_(0.25)
    check(tensors)
    assert len(folds) == 3


def test_optimizer_steps() -> None:
    layer = fn.LayerNormLinear(256, 128, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = inputs()[0]
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                y = layer(x)
            bar = eager(x, *layer.parameters())
            truth = eager(*as_float64([x, *layer.parameters()]))
            assert_within_budget("y", y, truth, bar)
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_other_parameters_in_the_same_memory(folds: list[int]) -> None:
    """Regression: a freed parameter's successor may have its address, its id and its version."""
    x, gamma, beta, weight, bias = inputs()
    for scale in (1.0, 2.0, 3.0, 4.0):
        check([x, gamma * scale, beta, weight, bias])
        check([x, gamma * scale, beta, weight, bias])


def test_goes_with_the_weight(folds: list[int]) -> None:
    tensors = inputs()
    check(tensors)
    check(tensors)
    assert kept_folds()
    del tensors
    gc.collect()
    assert not kept_folds()


def test_none_is_kept_where_a_gradient_follows(folds: list[int]) -> None:
    tensors = [t.requires_grad_() for t in inputs(rows=5000)]
    for _ in range(3):
        fn.fused_layernorm_linear(*tensors)
    assert not folds
    assert not kept_folds()


@pytest.mark.parametrize("rows", [50, 5000])
def test_graph_sees_the_weights_of_its_replay(rows: int) -> None:
    tensors = inputs(rows)
    for _ in range(3):
        fn.fused_layernorm_linear(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fn.fused_layernorm_linear(*tensors)
    tensors[3].mul_(-2)
    graph.replay()
    assert_within_budget("y", y, eager(*as_float64(tensors)), eager(*tensors))


def test_graph_with_frozen_parameters(folds: list[int]) -> None:
    tensors = inputs()
    graph = torch.cuda.CUDAGraph()
    with fn.frozen_parameters():
        for _ in range(2):
            check(tensors)
        with torch.cuda.graph(graph):
            y = fn.fused_layernorm_linear(*tensors)
    graph.replay()
    assert_within_budget("y", y, eager(*as_float64(tensors)), eager(*tensors))
    expected = y.clone()
    assert len(folds) == 1
    # Other weights and a fold of theirs leave the memory alone that the graph reads.
    tensors[3].mul_(2)
    for _ in range(3):
        check(tensors)
    graph.replay()
    assert torch.equal(y, expected)


def test_streams_and_threads() -> None:
    tensors = inputs()
    expected = [check(tensors) for _ in range(3)][-1]

    def run(_: int) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(4):
                y = fn.fused_layernorm_linear(*tensors)
        stream.synchronize()
        return y

    with ThreadPoolExecutor(8) as pool:
        for y in pool.map(run, range(32)):
            assert torch.equal(y, expected)


@pytest.mark.parametrize("mean", [0, 1, 10, 100, 1000])
def test_large_means(mean: float) -> None:
    tensors = inputs(rows=1500, mean=mean)
    for _ in range(2):
        check(tensors)


def test_misaligned_tensors() -> None:
    x, gamma, beta, weight, bias = inputs()
    shifted = []
    for tensor in (x, weight):
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        shifted.append(room[1:].view_as(tensor).copy_(tensor))
    for _ in range(2):
        check([shifted[0], gamma, beta, shifted[1], bias])


def test_inference_tensors_without_a_promise(folds: list[int]) -> None:
    with torch.inference_mode():
        tensors = [t.clone() for t in inputs()]
        for _ in range(3):
            check(tensors)
        assert not folds
        with fn.frozen_parameters():
            for _ in range(3):
                y = check(tensors)
            assert len(folds) == 1
            assert y.is_inference()
        # Nothing tells of it.
        tensors[3].mul_(2)
        with fn.frozen_parameters():
            for _ in range(3):
                check(tensors)
        assert len(folds) == 2
        check(tensors)


def test_beside_other_processes(folds: list[int]) -> None:
    """Sharded training writes gathered parameters without counting a version."""
    tensors = inputs()
    for _ in range(3):
        check(tensors)
    assert len(folds) == 1
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        tensors[3].data.mul_(2)
        for _ in range(3):
            check(tensors)
        assert len(folds) == 1
        with fn.frozen_parameters():
            tensors[3].add_(1)
            for _ in range(3):
                check(tensors)
        assert len(folds) == 2
    finally:
        torch.distributed.destroy_process_group()


def test_each_stream_makes_its_own(folds: list[int]) -> None:
    tensors = inputs()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number in (1, 2):
        for stream in streams:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    check(tensors)
        assert len(folds) == 2 * number
        torch.cuda.synchronize()
        tensors[3].mul_(2)
        torch.cuda.synchronize()


@pytest.mark.parametrize("index", [1, 3, 5, 6], ids=["gamma", "gate", "up", "bias of up"])
def test_pair_that_a_gate_joins(index: int, folds: list[int]) -> None:
    x, gamma, beta, gate, bias = inputs()
    tensors = [x, gamma, beta, gate, bias, torch.randn_like(gate) / 16, torch.randn_like(bias)]

    def composed(*tensors: Tensor) -> Tensor:
        x, gamma, beta, gate, bias, up, up_bias = tensors
        z = F.layer_norm(x, (256,), gamma, beta)
        return F.silu(F.linear(z, gate, bias)) * F.linear(z, up, up_bias)

    for number in (1, 2, 3):
        for _ in range(3):
            x, gamma, beta, gate, bias, up, up_bias = tensors
            (y,) = family_call(
                *(x, [gate, up], [bias, up_bias], (None, None, None), True, False),
                norm_weight=gamma,
                norm_bias=beta,
                activation="swiglu",
            )
            assert_within_budget("y", y, composed(*as_float64(tensors)), composed(*tensors))
        assert len(folds) == number
        tensors[index].mul_(1.25)
