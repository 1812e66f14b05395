"""The command: `python -m benchmarks`."""

from __future__ import annotations

import itertools
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_cases import provider, right, without_bias
from processes import run_python
from torch import Tensor

from benchmarks import command_line, environment, providers, runs, shapes
from benchmarks.case import dtype_name
from benchmarks.cli import main
from fused_norm.native import build


@pytest.mark.slow
def test_compiled_provider_in_every_mode() -> None:
    """Regression: a compiled backward frees what it saved, and so could not be run again."""
    command = ["-W", "ignore", "-m", "benchmarks", "--device", "cpu"]
    command += ["--op", "layernorm_linear", "--provider", "compile", "--seconds", "0.05"]
    command += ["--shape", "24,32,40", "--no-memory", "--mode", "backward", "--mode", "train"]
    command += ["--dtype", "float32"]
    done = run_python(*command, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "compile failed" not in line
        assert "compile wrong" not in line
        assert ", compile " in line


def test_clocks_are_those_of_the_measured_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the second of two GPUs is visible, nvidia-smi still lists the first one first."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$*" in *--id=GPU-2b*) ;; *) echo 1980 MHz;; esac; echo 1545 MHz\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    visible = SimpleNamespace(uuid="2b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: visible)
    assert environment.clocks(torch.device("cuda", 0)) == "1545 MHz"
    assert environment.clocks(torch.device("cpu")) == ""


def _cpu_seconds_of_children() -> float:
    """Other work on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "less",
    [
        ("--op", "layernorm_linear", "--shape", "16,8,16", "--seconds", "0.02"),
        pytest.param((), marks=pytest.mark.slow, id="all"),
    ],
)
def test_quick_run(less: tuple[str, ...], tmp_path: Path) -> None:
    """The command as a user runs it: within a minute of 2 cores, and right."""
    path = tmp_path / "quick.json"
    # Kernels that are built first are no part of it.
    for dtype, name in itertools.product(command_line.QUICK_DTYPES, build.CPU_EXTENSIONS):
        build.load(build.Extension(name, dtype))
    start = _cpu_seconds_of_children()
    done = run_python(
        *("-m", "benchmarks", "--quick", "--device", "cpu", *less),
        *("--json", str(path), "--csv", str(tmp_path / "quick.csv")),
        *("--plot", str(tmp_path / "plots"), "--interference"),
        timeout=300,
    )
    took = (_cpu_seconds_of_children() - start) / 2
    assert done.returncode == 0, done.stdout + done.stderr
    assert took < 60
    run = runs.load(path)
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


def test_gate(
    registry: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Measuring them takes most of the time; a quick run and one that is resumed do.
    monkeypatch.setattr(
        environment, "ceiling", lambda dtype, device: runs.Ceiling(dtype_name(dtype), 1e9, 1e9)
    )

    def slow(*inputs: Tensor) -> Tensor:
        time.sleep(0.02)
        return right(*inputs)

    arguments = ["--op", "layernorm_linear", "--shape", "24,32,40", "--seconds", "0.01"]
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
        main([*arguments])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_listing_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*providers.NAMES, *shapes.SETS):
        assert name in out
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == runs.schema()
