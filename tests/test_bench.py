"""The benchmark: that it refuses wrong results, keeps right ones, and measures what it says."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_norm import functional, reference
from fused_norm.__main__ import main
from fused_norm.bench import (
    baseline,
    check,
    cli,
    command_line,
    memory,
    plots,
    providers,
    report,
    results,
    shapes,
    timing,
)
from fused_norm.bench.blocks import BLOCKS
from fused_norm.bench.case import Case
from fused_norm.bench.check import errors, truth, verdict
from fused_norm.bench.ops import OPS, Member
from fused_norm.bench.plan import Listener, Plan
from fused_norm.bench.provider import Bound, Provider, as_function
from fused_norm.bench.results import Run
from fused_norm.bench.runner import Runner
from fused_norm.bench.shapes import Shape
from fused_norm.bench.timing import Budget

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "scripts/benchmark_page.py"
BRIEF = Budget(seconds=0.01, warm_up=0.001, fewest=3, most=5)
SHAPE = Shape(24, 32, 40)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute on one thread: two wait for each other for ages where another process has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan(*some_shapes: Shape, modes: tuple[str, ...] = ("forward", "train"), **kw: Any) -> Plan:
    device = torch.device(kw.pop("device", "cpu"))
    dtype = kw.pop("dtype", torch.float32)
    op = OPS[kw.pop("op", "layernorm_linear")]
    cases = [Case(op, shape, dtype, device) for shape in some_shapes or (SHAPE,)]
    return Plan(cases, modes, device, budget=kw.pop("budget", BRIEF), **kw)


def provider(name: str, function: Callable[..., Tensor], **kw: Any) -> Provider:
    """A provider made of a function of the op's inputs, of LayerNorm + Linear unless told."""
    return Provider(
        name,
        kw.pop("op", "layernorm_linear"),
        kw.pop("role", "peer"),
        "a test's",
        lambda: function,
        lambda function, case: lambda inputs: Bound(lambda: function(*inputs), inputs),
        **kw,
    )


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace all providers by eager and those given."""
    eager = [p for p in providers.PROVIDERS.values() if p.name == "eager"]

    def use(*others: Provider) -> None:
        found = {(p.op, p.name): p for p in (*eager, *others)}
        monkeypatch.setattr(providers, "PROVIDERS", found)

    use()
    return use


def run_of(*others: Provider, registry: Callable[..., None], **kw: Any) -> Run:
    registry(*others)
    return Runner(plan(*kw.pop("shapes", ()), **kw), Listener()).execute()


right = reference.layernorm_linear


def without_bias(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(x, g, b, w, None) + 0 * c


def without_gradient_of_gamma(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(x, g.detach(), b, w, c) + 0 * g.sum()


def not_a_number(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(x, g, b, w, c) * float("nan")


def in_float64(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(*(t.double() for t in (x, g, b, w, c)))


def in_bfloat16(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return right(*(t.bfloat16() for t in (x, g, b, w, c))).float()


@pytest.mark.parametrize(
    "function", [without_bias, not_a_number, in_float64, in_bfloat16], ids=lambda f: f.__name__
)
def test_wrong_output_is_reported_and_not_timed(
    function: Callable[..., Tensor], registry: Callable[..., None]
) -> None:
    run = run_of(provider("bad", function), provider("good", right), registry=registry)
    for measurement in run.measurements:
        bad, good = measurement.of("bad"), measurement.of("good")
        assert (bad.status, bad.timings, bad.vs_eager) == ("wrong", {}, {})
        assert "y is off by" in bad.message
        assert good.status == "ok"
        assert good.timings["wall"].median > 0
        assert max(good.errors.values()) < 1e-6


def test_wrong_gradient_is_not_timed_in_training(registry: Callable[..., None]) -> None:
    bad = provider("bad", without_gradient_of_gamma)
    run = run_of(bad, registry=registry, modes=("forward", "forward_grad", "backward", "train"))
    status = {m.mode: m.of("bad").status for m in run.measurements}
    assert status == {
        "forward": "ok",
        "forward_grad": "wrong",
        "backward": "wrong",
        "train": "wrong",
    }
    assert "grad_ln_weight is off by" in run.measurements[-1].of("bad").message
    assert [bool(m.of("bad").timings) for m in run.measurements] == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [SHAPE, Shape(199, 769, 97)], ids=str)
def test_check_lets_rounding_pass(
    shape: Shape, dtype: torch.dtype, registry: Callable[..., None]
) -> None:
    """The formulas of the reference round elsewhere than eager does, and are no less right."""

    def by_hand(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
        mean = x.float().mean(-1, keepdim=True)
        rstd = torch.rsqrt((x.float() - mean).square().mean(-1, keepdim=True) + 1e-5)
        return F.linear((((x.float() - mean) * rstd) * g + b).to(x.dtype), w, c)

    registry(provider("by hand", by_hand))
    made = Runner(plan(shape, dtype=dtype), Listener()).execute()
    assert [m.of("by hand").status for m in made.measurements] == ["ok", "ok"]


def residual_rms_norm_linear(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.linear(F.rms_norm(total, x.shape[-1:], g, 1e-5), w), total


def test_all_outputs_are_compared(registry: Callable[..., None]) -> None:
    """The second output, its gradient's way to the inputs, and how many there are."""
    op = "residual_rms_norm_linear"

    def other_sum(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return residual_rms_norm_linear(*inputs)[0], inputs[0]

    def without_gradient_of_sum(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        y, total = residual_rms_norm_linear(*inputs)
        return y, total.detach() + 0 * total

    def one(*inputs: Tensor) -> Tensor:
        return residual_rms_norm_linear(*inputs)[0]

    functions = {"good": residual_rms_norm_linear, "other sum": other_sum, "one": one}
    functions["no gradient"] = without_gradient_of_sum
    registry(*(provider(name, function, op=op) for name, function in functions.items()))
    forward, train = Runner(plan(op=op), Listener()).execute().measurements
    names = ["y", "sum", "grad_x", "grad_residual", "grad_norm_weight", "grad_weight"]
    assert list(train.of("good").errors) == names
    assert (train.of("good").status, train.of("eager").status) == ("ok", "ok")
    assert (forward.of("other sum").status, train.of("other sum").status) == ("wrong", "wrong")
    assert "sum is off by" in forward.of("other sum").message
    assert (forward.of("no gradient").status, train.of("no gradient").status) == ("ok", "wrong")
    assert "grad_residual is off by" in train.of("no gradient").message
    assert forward.of("one").message == "ValueError: returned 1 tensors, expected y, sum"


def test_check_needs_finite_eager() -> None:
    """Regression: beside an eager that is not finite, everything would count as right."""
    inf = float("inf")
    assert check.verdict({"y": inf}, {"y": inf}, torch.float32)
    assert not check.verdict({"y": 1e-7}, {"y": 1e-7}, torch.float32)


def test_failures_end_nothing(registry: Callable[..., None]) -> None:
    calls = 0

    def raises_at_once(*_: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nand more")

    def raises_later(*inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise ValueError("worn out")
        return right(*inputs)

    def exhausts(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    def load() -> object:
        raise ImportError("No module named 'peer'")

    def load_badly() -> object:
        raise OSError("libcuda.so.1: no such file")

    run = run_of(
        provider("at once", raises_at_once),
        provider("later", raises_later),
        provider("greedy", exhausts),
        provider("elsewhere", right, refuse=lambda case: "needs a GPU"),
        provider("small", right, refuse=lambda case: "is small" if case.shape.M > 24 else None),
        dataclasses.replace(provider("missing", right), load=load),
        dataclasses.replace(provider("broken", right), load=load_badly),
        provider("good", right),
        registry=registry,
        shapes=(SHAPE, Shape(25, 32, 40)),
    )
    problems = {p.name: p.problem for p in run.providers}
    assert problems["missing"] == "not installed: No module named 'peer'"
    assert problems["broken"] == "cannot be imported: OSError: libcuda.so.1: no such file"
    assert problems["elsewhere"] == "needs a GPU"
    assert problems["good"] == problems["small"] == ""
    assert run.finished
    assert len(run.measurements) == 4
    for measurement in run.measurements:
        found = {r.provider: (r.status, r.message) for r in measurement.results}
        assert found["at once"] == ("failed", "RuntimeError: no such kernel")
        assert found["greedy"][0] == "oom"
        assert found["small"][0] == ("ok" if measurement.shape[0] == 24 else "unsupported")
        assert found["good"] == ("ok", "")
        assert not {"missing", "broken", "elsewhere"} & set(found)
        assert measurement.of("good").timings
    assert run.measurements[-1].of("later").status == "failed"
    assert "worn out" in run.measurements[-1].of("later").message


def test_shape_that_does_not_fit_is_skipped(registry: Callable[..., None]) -> None:
    made = Runner(plan(Shape(2**31, 4096, 4096), SHAPE), Listener()).execute()
    assert made.finished
    huge, small = made.measurements[0], made.measurements[-1]
    assert huge.of("eager").status == "oom"
    assert "GiB are free" in huge.of("eager").message
    assert small.of("eager").status == "ok"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError], ids=lambda e: e.__name__)
@pytest.mark.parametrize("affordable", [0, 1], ids=["none", "one set"])
def test_inputs_that_do_not_fit_end_nothing(
    affordable: int,
    error: type[Exception],
    registry: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory runs out before the check, or after it when the other sets of inputs are made."""
    make = Case.inputs

    def inputs(case: Case, seed: int) -> list[Tensor]:
        if case.shape == SHAPE and seed >= 10 * affordable:
            raise error("CUDA out of memory")
        return make(case, seed)

    monkeypatch.setattr(Case, "inputs", inputs)
    run = run_of(provider("peer", right), registry=registry, shapes=(SHAPE, Shape(48, 32, 40)))
    assert run.finished
    assert [len(m.results) for m in run.measurements] == [2] * 4
    for measurement in run.measurements:
        for result in measurement.results:
            fits = measurement.shape[0] == 48
            assert result.status == ("ok" if fits else "oom")
            assert bool(result.timings) == fits
            assert bool(result.errors) == (fits or affordable > 0)


def test_out_of_memory_is_told_apart() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**46)
    assert memory.is_out_of_memory(raised.value)
    assert not memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_interrupt_keeps_what_was_measured(registry: Callable[..., None]) -> None:
    class Ear(Listener):
        calls = 0
        is_near = False

        def doing(self, text: str) -> None:
            self.is_near = text == "forward of layernorm_linear float32 48x32x40"

    ear = Ear()

    def interrupted(*inputs: Tensor) -> Tensor:
        # So long that a sample is one call.
        time.sleep(1e-4)
        ear.calls += ear.is_near
        if ear.calls > 20:
            raise KeyboardInterrupt
        return right(*inputs)

    registry(provider("peer", interrupted))
    budget = Budget(seconds=5.0, warm_up=0.0, fewest=3, most=30)
    made = Runner(plan(SHAPE, Shape(48, 32, 40), budget=budget), ear)
    with pytest.raises(KeyboardInterrupt):
        made.execute()
    assert not made.run.finished
    first, second, third = made.run.measurements
    assert first.of("peer").timings["wall"].rounds == 30
    assert second.of("peer").vs_eager["wall"] > 0
    # The rounds of the measurement that was interrupted count too.
    assert 3 <= third.of("eager").timings["wall"].rounds < 30
    assert third.of("eager").vs_eager["wall"] == 1
    assert third.of("peer").vs_eager["wall"] > 1


def test_interrupted_command_writes_its_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "fused_norm", "bench", "--json", str(path)]
    command += ["--provider", "linear", "--op", "layernorm_linear", "--device", "cpu"]
    command += [*("--shape", "16,8,16"), *("--shape", "4096,1024,1024"), *("--seconds", "60")]
    command += ["--mode", "forward", "--no-memory", "--dtype", "float32"]

    def listen() -> None:
        # A shell's background jobs, and so their children, ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listen) as process:
        assert process.stderr is not None
        # 200 rounds of the small shape take no time, those of the other many seconds.
        line = process.stderr.readline()
        assert line.startswith("[1/2 "), line + process.stderr.read()
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(timeout=30) == cli.INTERRUPTED
    run = results.load(path)
    assert not run.finished
    assert run.measurements[0].of("linear").timings["wall"].median > 0


def test_going_on_measures_what_is_missing(
    tmp_path: Path, registry: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    common = ["bench", "--op", "layernorm_linear", "--device", "cpu", "--seconds", "0.01"]
    common += ["--no-memory", "--json", str(path), "--provider", "eager", "--dtype", "float32"]
    assert main([*common, "--shape", "24,32,40", "--mode", "forward"]) == 0
    first = results.load(path).measurements[0]
    more = ["--shape", "24,32,40", "--shape", "48,32,40", "--mode", "forward", "--mode", "train"]
    assert main([*common, *more, "--resume"]) == 0
    made = results.load(path)
    assert [(m.mode, m.shape[0]) for m in made.measurements] == [
        ("forward", 24),
        ("train", 24),
        ("forward", 48),
        ("train", 48),
    ]
    assert made.measurements[0] == first
    assert [p.name for p in made.providers] == ["eager"]
    assert len(made.ceilings) == 1

    data = json.loads(path.read_text())
    data["environment"]["cpu"] = "another"
    path.write_text(json.dumps(data))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*common, *more, "--resume"])
    assert "its cpu is another, and now it is" in capsys.readouterr().err


def test_time_limit(registry: Callable[..., None]) -> None:
    made = Runner(plan(SHAPE, Shape(48, 32, 40), time_limit=0.0), Listener()).execute()
    assert made.measurements == []
    assert not made.finished


def _assert_follows(schema: dict[str, Any], value: Any, top: dict[str, Any]) -> None:
    if "$ref" in schema:
        schema = top["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        kinds = {"integer": int, "null": type(None)}
        assert any(isinstance(value, kinds[option["type"]]) for option in schema["anyOf"])
        return
    kind = schema["type"]
    if kind == "object" and "properties" in schema:
        assert list(value) == schema["required"]
        for name, inner in schema["properties"].items():
            assert inner["description"].endswith(".")
            _assert_follows(inner, value[name], top)
    elif kind == "object":
        for inner in value.values():
            _assert_follows(schema["additionalProperties"], inner, top)
    elif kind == "array":
        for inner in value:
            _assert_follows(schema["items"], inner, top)
    else:
        kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
        assert isinstance(value, kinds[kind]), (schema, value)


def test_json_follows_its_schema(tmp_path: Path, registry: Callable[..., None]) -> None:
    made = run_of(provider("peer", right), registry=registry)
    path = tmp_path / "folder" / "results.json"
    results.save(made, path)
    data, schema = json.loads(path.read_text()), results.schema()
    _assert_follows(schema, data, schema)
    results.save(results.load(path), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize("damage", ["extra", "missing", "type", "version", "list"])
def test_other_json_is_refused(damage: str, tmp_path: Path, registry: Callable[..., None]) -> None:
    path = tmp_path / "results.json"
    results.save(run_of(registry=registry), path)
    data = json.loads(path.read_text())
    if damage == "extra":
        data["measurements"][0]["color"] = "red"
    elif damage == "missing":
        del data["environment"]["threads"]
    elif damage == "type":
        data["seed"] = "zero"
    elif damage == "version":
        data["schema"] += 1
    else:
        data = [data]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="schema 1"):
        results.load(path)


def test_csv_has_a_row_for_each_metric(tmp_path: Path, registry: Callable[..., None]) -> None:
    bad = provider("bad", without_bias)
    run = run_of(bad, registry=registry)
    report.write_csv(run, tmp_path / "results.csv")
    header, *rows = (tmp_path / "results.csv").read_text().splitlines()
    assert header == ",".join(report.CSV_FIELDS)
    assert len(rows) == 4
    assert rows[0].startswith("layernorm_linear,forward,float32,24x32x40,eager,ok,wall,")
    assert ",bad,wrong,," in rows[1]


def _scaled(run: Run, factor: float, *, provider: str, spread: float = 0.01) -> Run:
    """The same run with all spreads set, and one provider's times scaled."""
    copy = results._from_json(Run, json.loads(json.dumps(dataclasses.asdict(run))))
    for measurement in copy.measurements:
        for result in measurement.results:
            for name in result.timings:
                scale = factor if provider in (result.provider, "all") else 1.0
                median = 100.0 * scale
                low, high = median * (1 - spread / 2), median * (1 + spread / 2)
                result.timings[name] = results.Timing(median, low, high, low, 20)
    return copy


def test_baseline_names_what_moved(
    registry: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    run = run_of(provider("peer", right), provider("other", right), registry=registry)
    before = _scaled(run, 1.0, provider="peer")
    moves = baseline.show(before, _scaled(run, 1.3, provider="peer"), Console(width=150))
    assert [m.name.split()[-2] for m in moves] == ["peer", "peer"]
    assert [round(m.change, 6) for m in moves] == [1.3, 1.3]
    out = capsys.readouterr().out
    assert "2 of 4 times moved" in out
    assert "+30.0%" in out


def test_baseline_leaves_noise_and_the_machine_out(registry: Callable[..., None]) -> None:
    run = run_of(provider("peer", right), registry=registry)
    before = _scaled(run, 1.0, provider="peer")
    slower_machine = _scaled(run, 1.5, provider="all")
    assert not any(m.is_beyond_noise for m in baseline.moves(before, slower_machine))
    noisy = _scaled(run, 1.1, provider="peer", spread=0.2)
    assert not any(m.is_beyond_noise for m in baseline.moves(before, noisy))
    quiet = _scaled(run, 1.1, provider="peer")
    assert all(m.is_beyond_noise for m in baseline.moves(before, quiet))


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
    assert 0.002 <= slow.sample()["wall"] < 0.02


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


def test_ops_agree_with_their_formulas() -> None:
    x, o = torch.randn(5, 33, dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    expected = F.layer_norm(x, (33,), None, None, 0.25**2)
    torch.testing.assert_close(OPS["layer_norm"].reference(x, o), expected)


SHORT = ("layernorm_linear", "layer_norm", "residual_rms_norm_linear", "norm_swiglu", "norm_mlp")


@pytest.mark.parametrize(
    "op", [op if op in SHORT else pytest.param(op, marks=pytest.mark.slow) for op in OPS]
)
def test_every_installed_provider_of_this_machine_is_right(op: str, device: str) -> None:
    """All that can be imported here and needs no compiler, on a shape where nothing divides."""
    names = [name for name in providers.NAMES if name not in command_line.SLOW]
    for shape in (Shape(37, 50, 65), Shape(24, 32, 40)):
        made = Runner(
            plan(shape, op=op, device=device, names=names, measures_memory=False), Listener()
        ).execute()
        for measurement in made.measurements:
            for result in measurement.results:
                assert result.status in ("ok", "unsupported"), result
            assert measurement.of("eager").vs_eager[measurement.metric] == 1


@pytest.mark.slow
def test_compiled_provider_in_every_mode() -> None:
    """Regression: a compiled backward frees what it saved, and so could not be run again."""
    command = [sys.executable, "-W", "ignore", "-m", "fused_norm", "bench", "--device", "cpu"]
    command += ["--op", "layernorm_linear", "--provider", "compile", "--seconds", "0.05"]
    command += ["--shape", "24,32,40", "--no-memory", "--mode", "backward", "--mode", "train"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "compile failed" not in line
        assert "compile wrong" not in line
        assert ", compile " in line


def test_quick_run(tmp_path: Path) -> None:
    """The whole command, as a user runs it: within a minute, and what is ours is right."""
    path = tmp_path / "quick.json"
    start = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fused_norm", "bench", "--quick", "--device", "cpu"),
            *("--json", str(path), "--csv", str(tmp_path / "quick.csv")),
            *("--plot", str(tmp_path / "plots"), "--interference"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    took = time.perf_counter() - start
    assert done.returncode == 0, done.stdout + done.stderr
    assert took < 60
    run = results.load(path)
    assert run.measurements[0].of("fused_norm").timings
    assert run.interference
    for name in ("cpu", "software", "LayerNorm + Linear, forward, float32", "fused_norm"):
        assert name in done.stdout
    # A busy machine's time limit leaves out the larger shape.
    assert {m.dtype for m in run.measurements} == set(command_line.QUICK_DTYPES)
    # No control characters where nobody looks at a terminal.
    assert "\x1b" not in done.stdout + done.stderr
    assert len(list((tmp_path / "plots").glob("*.png"))) >= 3
    environment = run.environment
    assert environment.torch == torch.__version__
    assert environment.threads >= 1
    assert environment.cache_bytes >= 2**20


def test_gate(registry: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def slow(*inputs: Tensor) -> Tensor:
        time.sleep(0.02)
        return right(*inputs)

    arguments = ["bench", "--op", "layernorm_linear", "--shape", "24,32,40", "--seconds", "0.01"]
    arguments += ["--mode", "forward", "--device", "cpu", "--no-memory"]
    registry(provider("mine", slow, role="ours"))
    assert main(arguments) == 0
    assert main([*arguments, "--max-ratio", "1.5"]) == 1
    assert "of eager's, over 1.5" in capsys.readouterr().out
    registry(provider("mine", without_bias, role="ours"))
    assert main(arguments) == 1
    assert "wrong: y is off by" in capsys.readouterr().out
    registry(provider("theirs", without_bias))
    assert main(arguments) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "3,4"],
        ["--device", "meta"],
        ["--baseline", "nowhere.json"],
        ["--provider", "nobody"],
        ["--nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_command_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_other_commands_still_refuse_what_they_do_not_know() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--nonsense"])
    assert ended.value.code == 2


def test_listing_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    for name in (*providers.NAMES, *shapes.SETS):
        assert name in out
    assert main(["bench", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == results.schema()


def test_plots_show_something(tmp_path: Path, registry: Callable[..., None]) -> None:
    import matplotlib.image

    shapes_ = (SHAPE, Shape(48, 64, 32), Shape(7, 9, 11))
    registry(provider("fused_norm", right, role="ours"), provider("other", right))
    run = Runner(plan(*shapes_), Listener()).execute()
    written = plots.write(run, tmp_path)
    assert [path.stem.removeprefix("layernorm_linear-float32-") for path in written] == [
        "ratio-wall",
        "time",
        "memory",
    ]
    for path in written:
        picture = matplotlib.image.imread(path)
        assert picture.shape[0] > 300
        assert picture.shape[1] > 600
        ours = torch.tensor(picture[..., :3]) - torch.tensor([0xD1, 0x49, 0x5B]) / 255
        # Our dots, three in each of two columns.
        assert int((ours.abs().amax(-1) < 0.02).sum()) > 200


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_follows_the_results(
    tmp_path: Path, registry: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*inputs: Tensor) -> Tensor:
        time.sleep(0.002)
        return right(*inputs)

    registry(provider("fused_norm", slow, role="ours"), provider("bad", without_bias))
    made = Runner(plan(), Listener()).execute()
    path = tmp_path / "results/machine.json"
    results.save(made, path)
    page_script = _script(PAGE)
    where = ["--results", str(path.parent), "--docs", str(tmp_path / "docs")]
    assert page_script.main([*where, "--check"]) == 1
    assert page_script.main(where) == 0
    assert page_script.main([*where, "--check"]) == 0

    page = (tmp_path / "docs/benchmarks.md").read_text()
    saved = results.load(path)
    for measurement in saved.measurements:
        ratio = measurement.of("fused_norm").vs_eager["wall"]
        assert f"| **{ratio:.2f}** | wrong |" in page
        name = f"| layernorm_linear {measurement.mode} float32 24x32x40 | fused_norm, wall |"
        assert f"{name} {ratio:.2f} |" in page
    assert "y is off by" in page
    images = sorted((tmp_path / "docs/images/benchmarks").glob("*.png"))
    assert [f"images/benchmarks/{image.name}" in page for image in images] == [True] * 3

    data = json.loads(path.read_text())
    data["measurements"][0]["results"][1]["vs_eager"]["wall"] = 0.5
    path.write_text(json.dumps(data))
    capsys.readouterr()
    assert page_script.main([*where, "--check"]) == 1
    stale = capsys.readouterr().err
    assert "was not drawn from machine.json" in stale
    assert "is not what the results give" in stale


def test_round_of_the_family_measures_every_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU machine is asked for every seam at the named shapes, in command lines that hold."""
    script = _script(ROOT / "scripts/gpu_round.py")
    commands: list[list[str]] = []
    monkeypatch.setattr(script, "_logged", lambda command, *_: commands.append(command) or 0)
    (tmp_path / "commit").write_text("abc\n")
    (tmp_path / "h200-norm_mlp.json").write_text("{}")
    options = argparse.Namespace(folder=tmp_path, out=tmp_path / "out", name="h200")
    options.op, options.no_compile, options.seconds = None, True, 0.2
    options.out.mkdir()
    assert script._family(options, {}, 600.0) == 0
    made = [command_line.parser().parse_args(command[4:]) for command in commands]
    assert {op for each in made for op in each.op} == set(OPS) - {"layernorm_linear", "layer_norm"}
    for each in made:
        assert each.json == options.out / f"h200-{each.op[0]}.json"
        assert (each.shapes, each.dtype, each.mode) == (
            ["named"],
            ["bfloat16"],
            ["forward", "train"],
        )
        assert "compile" not in each.provider
        assert each.time_limit < 600
    # What was measured before is gone on with.
    assert [path.name for path in options.out.iterdir()] == ["h200-norm_mlp.json"]
    assert script._family(options, {}, 30.0) == 0
    assert len(commands) == len(made)


@pytest.mark.skipif(
    not list((ROOT / "benchmarks/results").glob("*.json")), reason="no results are committed"
)
def test_committed_page_follows_the_committed_results() -> None:
    assert _script(PAGE).main(["--check"]) == 0


def test_importing_the_library_leaves_the_benchmark_out() -> None:
    script = "import sys, fused_norm.__main__; print(*sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", script], text=True)
    loaded = [name for name in out.split() if name.startswith(("fused_norm.bench", "matplotlib"))]
    assert loaded == []


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


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.op.name)
def test_our_block_is_eagers(block: Member) -> None:
    kind = block.ours.args[0]
    width = 2 * kind.head * kind.share
    case = Case(block.op, Shape(3 * kind.batch, width, 96), torch.float32, torch.device("cpu"))
    inputs, grads = case.inputs(0), case.grad_outputs(0)
    exact = truth(case.op.reference, case, inputs, grads)
    found = {}
    for provider in (block.op.reference, partial(block.ours, functional)):
        bind = as_function(provider, case)
        found[provider] = errors(bind, inputs, grads, exact, gradients=True)
    eager, ours = found.values()
    assert verdict(ours, eager, torch.float32) == ""
    # Every input has a gradient, of eager's and ours.
    assert not [name for name, gradient in exact.gradients.items() if gradient is None]
    with pytest.raises(ValueError, match="whole heads"):
        block.op.inputs(Shape(3 * kind.batch, width + 1, 96))
