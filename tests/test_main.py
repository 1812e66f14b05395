"""The commands of `python -m fused_norm`: what they refuse, and the small check of this machine."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from devices import GPU
from rich.console import Console
from torch import Tensor

from fused_norm import bench
from fused_norm.__main__ import main

SMALL = ["bench", "--device", "cpu", "--dtype", "float32", "--shape", "24,32,40", "--rounds", "3"]


def test_bench_compares_with_eager_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    for op in bench.OPS:
        (line,) = [line for line in lines if line.startswith(op.name)]
        forward, training = line.split()[-1], line.split()[-4]
        assert float(forward) > 0
        assert float(training) > 0
    assert max(map(len, lines)) <= 80


def test_bench_measures_the_usual_sizes_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_wrong", lambda *_: "")
    monkeypatch.setattr(bench, "_training", lambda *_: None)
    for seconds, shown in ((9.99, "9.99 s"), (0.99999, "1000 ms"), (99.9e-6, "99.9 us")):
        monkeypatch.setattr(bench, "_times", lambda *_, t=seconds: (t, t))
        assert main(["bench", "--device", "cpu", "--dtype", "bfloat16"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        for shape in bench.SHAPES["cpu"]:
            assert out.count(", ".join(map(str, shape))) == len(bench.OPS)
        # Number and unit stay together.
        assert out.count(f" {shown} ") == 2 * len(bench.OPS) * len(bench.SHAPES["cpu"])


def test_bench_says_what_it_times_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: it said nothing until its table, after a minute on two busy cores."""
    monkeypatch.setattr(bench, "_wrong", lambda *_: "")
    monkeypatch.setattr(bench, "_times", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(bench, "Console", functools.partial(Console, force_terminal=True))
    assert main(SMALL) == 0
    shown = capfd.readouterr()
    assert f"Checking and timing {bench.OPS[0].name}, float32, 24, 32, 40" in shown.err
    assert "Checking" not in shown.out


def test_no_ratio_of_bench_is_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_times", lambda *_: (1e-6, 1e-3))
    assert main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count(" 1e-03") for line in lines) == 2 * len(bench.OPS)
    assert max(map(len, lines)) <= 80


def test_bench_has_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--max-ratio", "0"]) == 1
    assert capsys.readouterr().out.count("of eager's time, over 0") == 2 * len(bench.OPS)


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_bench_finds_wrong_results(
    wrong: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ours(*inputs: Tensor) -> Tensor:
        return bench.OPS[0].eager(*inputs) * (1 + wrong)

    op = bench.Op("off", False, ours, bench.OPS[0].eager)
    monkeypatch.setattr(bench, "OPS", [op])
    assert main(SMALL) == 1
    assert "y is off by" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_bench_is_right_in_each_dtype(device: str) -> None:
    for op in bench.OPS:
        inputs = bench._inputs(op, (24, 32, 40), torch.bfloat16, device)
        assert bench._wrong(op, inputs) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--nonsense"],
        ["bench", "--nonsense"],
        ["bench", "--shape", "3,4"],
        ["bench", "--shape", "3,0,4"],
        ["bench", "--device", "meta"],
        ["bench", "--rounds", "0"],
        ["bench", "--max-ratio", "nan"],
        ["build", "--dtype", "float8"],
        ["tune", "--sizes", "1,2"],
        ["tune", "--seconds", "nan"],
        ["tune", "--seconds", "-1"],
        ["tune", "--model", "os:getcwd"],
        ["docter"],
    ],
    ids=" ".join,
)
def test_commands_that_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert max(map(len, err.splitlines())) <= 80


def test_the_library_leaves_the_benchmark_and_the_tutorial_out() -> None:
    script = "import sys, fused_norm.__main__; print(*sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", script], text=True)
    beside = ("benchmarks", "tutorial", "scripts", "matplotlib")
    assert [name for name in out.split() if name.split(".")[0] in beside] == []
