"""Failures, lack of memory, interrupts and time limits keep what was measured."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_cases import SHAPE, plan, provider, right, run_of
from torch import Tensor

from benchmarks import cli, memory, runs
from benchmarks.case import Case
from benchmarks.cli import main
from benchmarks.plan import Listener
from benchmarks.runner import Runner
from benchmarks.shapes import Shape
from benchmarks.timing import Budget


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
    command = [sys.executable, "-m", "benchmarks", "--json", str(path)]
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
        assert process.wait(timeout=600) == cli.INTERRUPTED
    run = runs.load(path)
    assert not run.finished
    assert run.measurements[0].of("linear").timings["wall"].median > 0


def test_going_on_measures_what_is_missing(
    tmp_path: Path, registry: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    common = ["--op", "layernorm_linear", "--device", "cpu", "--seconds", "0.01"]
    common += ["--no-memory", "--json", str(path), "--provider", "eager", "--dtype", "float32"]
    assert main([*common, "--shape", "24,32,40", "--mode", "forward"]) == 0
    first = runs.load(path).measurements[0]
    more = ["--shape", "24,32,40", "--shape", "48,32,40", "--mode", "forward", "--mode", "train"]
    assert main([*common, *more, "--resume"]) == 0
    made = runs.load(path)
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
