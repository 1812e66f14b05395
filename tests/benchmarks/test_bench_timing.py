"""What is timed: rounds, inputs that exceed the cache, work and memory counted, shapes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from bench_cases import plan, provider, right
from torch import Tensor

import fused_norm as fn
from benchmarks import command_line, memory, shapes, timing
from benchmarks.case import Case
from benchmarks.ops import OPS
from benchmarks.plan import Listener
from benchmarks.runner import Runner
from benchmarks.shapes import Shape
from benchmarks.timing import Budget
from fused_norm.call import contexts


class _Sleeper:
    """A timer that records who was sampled when."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def warm_up(self, seconds: float) -> None:
        pass

    def sample(self) -> dict[str, float]:
        self._log.append(self._name)
        return {"wall": len(self._log) * 1e-6}


def test_rounds_are_interleaved() -> None:
    log: list[str] = []
    timers = {name: _Sleeper(name, log) for name in "abc"}
    rounds = timing.Rounds(timers, Budget(0.0, 0.0, fewest=20, most=20), seed=0)
    rounds.run()
    by_round = [tuple(log[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in by_round)
    assert len(set(by_round)) > 3
    assert rounds.timings("a")["wall"].rounds == 20


def test_cpu_timer_rotates_and_gathers_short_calls() -> None:
    calls: list[int] = []
    timer = timing.CpuTimer([lambda i=i: calls.append(i) for i in range(5)])
    timer.warm_up(0.001)
    del calls[:]
    timer.sample()
    # A call of a tenth of a microsecond is timed in hundreds.
    assert len(calls) > 20
    assert calls[1] == (calls[0] + 1) % 5
    assert {calls.count(i) for i in range(5)} <= {len(calls) // 5, len(calls) // 5 + 1}

    slow = timing.CpuTimer([lambda: time.sleep(0.002)])
    slow.warm_up(0.001)
    # The shortest of several: on a busy machine, a sleep may last.
    assert 0.002 <= min(slow.sample()["wall"] for _ in range(5)) < 0.02


def test_summary() -> None:
    found = timing.summary([value * 1e-6 for value in range(1, 102)])
    assert found.median == pytest.approx(51)
    assert found.p20 == pytest.approx(21)
    assert found.p80 == pytest.approx(81)
    assert (found.minimum, found.rounds) == (pytest.approx(1), 101)
    assert found.spread == pytest.approx(60 / 51)
    few = timing.summary([3e-6, 1e-6, 2e-6])
    assert few.median == pytest.approx(statistics.median([1, 2, 3]))


def test_inputs_exceed_the_cache() -> None:
    cpu = torch.device("cpu")
    large = Case(OPS["layernorm_linear"], Shape(512, 1024, 1024), torch.float32, cpu)
    one = 4 * (2 * 512 * 1024 + 1024 * 1024 + 3 * 1024)
    cache = 32 * 2**20
    count, is_past = memory.input_sets(large, "forward", cache, most=32, providers=5)
    assert is_past
    assert (count - 1) * one < 2 * cache <= count * one
    tiny = Case(OPS["layernorm_linear"], Shape(16, 8, 16), torch.float32, cpu)
    assert memory.input_sets(tiny, "forward", cache, most=32, providers=5) == (32, False)
    assert memory.input_sets(large, "forward", 0, most=32, providers=5) == (1, False)


def test_work_is_counted() -> None:
    op, shape = OPS["layernorm_linear"], Shape(8192, 4096, 12288)
    mkn, mk, kn, mn = 8192 * 4096 * 12288, 8192 * 4096, 4096 * 12288, 8192 * 12288
    assert op.operations(shape, "forward") == 2 * mkn
    assert op.operations(shape, "backward") == 4 * mkn
    assert op.operations(shape, "train") == 6 * mkn
    vectors = 2 * 4096 + 12288
    assert op.traffic(shape, "forward", 2) == 2 * (mk + kn + mn + vectors)
    assert op.traffic(shape, "forward_grad", 2) == 2 * (mk + kn + mn + vectors) + 8 * 8192
    backward = 2 * (mn + 2 * mk + 2 * kn + 2 * vectors) + 8 * 8192
    assert op.traffic(shape, "backward", 2) == backward
    both = op.traffic(shape, "forward_grad", 2) + backward
    assert op.traffic(shape, "train", 2) == both
    assert OPS["layer_norm"].traffic(Shape(10, 20, 1), "forward", 4) == 4 * (2 * 200 + 1)


def test_work_of_several_inputs_and_outputs_is_counted() -> None:
    M, K, N = shape = Shape(64, 32, 16)
    residual = OPS["residual_rms_norm_linear"]
    assert residual.operations(shape, "train") == 6 * M * K * N
    assert residual.traffic(shape, "forward", 2) == 2 * (3 * M * K + K + N * K + M * N)
    # Reads the gradients of both outputs and the sum; both summands have one gradient.
    moved = 2 * (M * K + M * N) + 2 * 2 * (M * K + K + N * K) + 4 * M
    assert residual.traffic(shape, "backward", 2) == moved
    flops = {"norm_swiglu": 4, "norm_qkv": 3, "norm_qkv_equal": 6, "norm_mlp": 6, "norm_gelu": 2}
    for name, times in flops.items():
        assert OPS[name].operations(shape, "forward") == times * M * K * N
    # Of an MLP both products are held, not its output alone.
    assert OPS["norm_mlp"].held(shape, 1) == M * K + K + 3 * N * K + M * (2 * N + K)
    modulation = Case(OPS["adaln_linear"], shape, torch.float32, torch.device("cpu")).inputs(0)[1]
    assert modulation.shape == (8, 1, 32)


def test_quick_is_for_two_ops() -> None:
    def ops(*arguments: str) -> list[str]:
        made = command_line.plan_of(
            command_line.parser().parse_args([*arguments, "--device", "cpu"])
        )
        return list(dict.fromkeys(case.op.name for case in made.cases))

    assert ops("--quick") == ["layernorm_linear", "layer_norm"]
    assert ops("--quick", "--op", "norm_mlp") == ["norm_mlp"]
    assert ops() == list(OPS)


def test_every_dtype_comes_before_the_next_shape() -> None:
    made = command_line.plan_of(command_line.parser().parse_args(["--quick", "--device", "cpu"]))
    cases = [case for case in made.cases if case.op.name == "layernorm_linear"]
    dtypes = [getattr(torch, name) for name in command_line.QUICK_DTYPES]
    expected = [(s, d) for s in command_line.QUICK_SHAPES["layernorm_linear"] for d in dtypes]
    assert [(tuple(case.shape), case.dtype) for case in cases] == expected


def test_peak_memory_counts_what_a_call_holds(device: str) -> None:
    x = torch.randn(1024, 1024, device=device)

    def call() -> Tensor:
        first = x + 1
        second = first + 1
        del first
        return second

    call()
    # Scalars come on top.
    assert 0 <= memory.peak(call, torch.device(device)) - 2 * x.nbytes < 2048


def test_shapes_are_parsed() -> None:
    assert shapes.parse("3,4,5") == Shape(3, 4, 5)
    for wrong in ("3,4", "3,4,0", "3,4,x", ""):
        with pytest.raises(ValueError, match=r"M,K,N|invalid literal"):
            shapes.parse(wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
class TestGpu:
    def test_measures_graphs_launches_and_host_time(self, registry: Callable[..., None]) -> None:
        registry(provider("good", right))
        modes = ("forward", "forward_grad", "backward", "train")
        made = Runner(
            plan(Shape(2048, 1024, 1024), modes=modes, device="cuda", dtype=torch.bfloat16),
            Listener(),
        ).execute()
        assert made.environment.gpu
        assert made.environment.driver
        for measurement in made.measurements:
            for name in ("eager", "good"):
                result = measurement.of(name)
                assert (result.status, result.message) == ("ok", "")
                assert set(result.timings) == {"launch", "host", "graph"}
                assert result.timings["host"].median <= result.timings["launch"].median
                assert result.timings["graph"].median < result.timings["launch"].median * 1.1
                assert result.peak_bytes > 2048 * 1024
            assert measurement.metric == "graph"

    @pytest.mark.skipif(
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
        reason="other tests use the GPU at the same time",
    )
    def test_graph_time_is_device_time(self, registry: Callable[..., None]) -> None:
        """A product of known length: its rate must be possible, and near what events say."""
        made = Runner(
            plan(Shape(8192, 4096, 4096), modes=("forward",), device="cuda", dtype=torch.bfloat16),
            Listener(),
        ).execute()
        x, g, b, w, c = made_inputs = Case(
            OPS["layernorm_linear"], Shape(8192, 4096, 4096), torch.bfloat16, torch.device("cuda")
        ).inputs(0)
        with torch.no_grad():
            right(*made_inputs)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(1_000_000)
            events[0].record()
            for _ in range(20):
                right(x, g, b, w, c)
            events[1].record()
            torch.cuda.synchronize()
        expected = events[0].elapsed_time(events[1]) * 1e3 / 20
        measured = made.measurements[0].of("eager").timings["graph"].median
        assert measured == pytest.approx(expected, rel=0.15)

    def test_what_is_frozen_is_prepared_before_a_graph_is_captured(self) -> None:
        """Otherwise a graph would prepare it in each of its replays."""
        x, w = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        prepared: list[int] = []

        def step() -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                found = contexts.find([w])
                prepared.append(len(found[0]._prepared) if found else 0)
            return fn.norm_linear(x, w, recipe="rowwise")

        timer = timing.GpuTimer([step], torch.cuda.Stream(), fn.frozen_parameters)
        with torch.no_grad():
            timer.warm_up(0.01)
        assert not timer.problem
        assert prepared
        assert all(prepared)

    def test_graph_that_records_nothing_is_refused(self, registry: Callable[..., None]) -> None:
        """Work that a graph does not record would be timed at nothing."""
        kept: list[Tensor] = []

        def elsewhere(*inputs: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                return kept[-1].clone()
            y = right(*inputs)
            kept.append(torch.zeros_like(y))
            return y

        registry(provider("bad", elsewhere))
        made = Runner(
            plan(Shape(256, 256, 256), modes=("forward",), device="cuda"), Listener()
        ).execute()
        result = made.measurements[0].of("bad")
        assert "a replay does not give what a call gives" in result.message
        assert set(result.timings) == {"launch", "host"}
