"""Puzzle 22's driver as a user starts it: what it prints and how it exits."""

from __future__ import annotations

import functools
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from processes import ROOT, run_python, run_script

import fused_norm as fn

GPU_VERDICT = "OK CORRECT" if torch.cuda.is_available() else r"SKIPPED \(no GPU\)"

# Faults that a kernel could have: file, text, replacement.
FAULTS = [
    ("fused.mojo", "acc + rebind[Scalar[dtype]](linear_bias[out_idx])", "acc"),
    ("fused_backward.mojo", "- sum_grad_normalized / Scalar[dtype](hidden_dim)", ""),
]


run = functools.partial(run_script, "solutions/p22/p22.py")


@pytest.mark.slow
def test_unfused_times_what_it_names() -> None:
    """Regression: a CPU ran the fused kernel under that name. --size gives way to single sizes."""
    result = run("--unfused", "--size", "real", "--seq", "2", "--hidden", "33")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[4, 2, 33] -> [4, 2, 1024]" in result.stdout
    assert "OK Using Mojo unfused kernel (CPU)" in result.stdout
    assert "Compiling unfused kernel for the CPU" in result.stderr


@pytest.mark.slow
def test_other_sizes() -> None:
    """The options reach the kernels, and the gradients are checked for two incoming gradients."""
    result = run("--backward", "--batch", "3", "--seq", "5", "--hidden", "33", "--output", "19")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[3, 5, 33] -> [3, 5, 19]" in result.stdout
    devices = 1 + torch.cuda.is_available()
    assert len(re.findall(r"^   grad_linear_weight: \S+ OK$", result.stdout, re.M)) == 2 * devices
    assert re.search(rf"^   - GPU Backward: +{GPU_VERDICT}$", result.stdout, re.MULTILINE)
    assert "Overall Result: OK ALL CORRECT" in result.stdout


def copy_repository(root: Path) -> Path:
    for part in ("op", "fused_norm", "solutions", "tutorial"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("*.so"))
    return root


@pytest.mark.slow
def test_fails_when_a_kernel_is_wrong_and_compiles_once(tmp_path: Path) -> None:
    """The second run uses what the first one compiled, with the same wrong result."""
    root = copy_repository(tmp_path / "copy")
    for name, text, replacement in FAULTS:
        source = root / "op" / "puzzle" / name
        original = source.read_text()
        assert original.count(text) == 1
        source.write_text(original.replace(text, replacement))
    cache = {"MODULAR_CACHE_DIR": str(tmp_path / "cache")}

    compiled = []
    for _ in range(2):
        result = run("--fused", root=root, **cache)
        files = (tmp_path / "cache").rglob("*")
        compiled.append({path: path.stat().st_mtime_ns for path in files if path.is_file()})
        assert result.returncode == 1, result.stdout + result.stderr
        assert re.search(r"^   - CPU: +INCORRECT$", result.stdout, re.MULTILINE)
        assert "Overall Correctness: SOME INCORRECT" in result.stdout
        assert "iterations" not in result.stdout
    assert compiled[0]
    assert compiled[1] == compiled[0]

    result = run("--backward", root=root, **cache)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"^   grad_input: \S+ INCORRECT$", result.stdout, re.MULTILINE)
    assert re.search(r"^   grad_linear_weight: \S+ OK$", result.stdout, re.MULTILINE)
    assert "Overall Result: SOME INCORRECT" in result.stdout


def assert_is_refused(
    driver: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Have a driver's arguments refused, in this process, and nothing printed before."""
    main = runpy.run_path(str(ROOT / "solutions" / driver), run_name="imported")["main"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert said.out == ""


def test_refuses_sizes_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    message = "hidden_dim must be from 1 to 1024, got 1025"
    assert_is_refused("p22/p22.py", ["--fused", "--hidden", "1025"], message, capsys)


def test_says_what_does_not_compile(tmp_path: Path) -> None:
    root = copy_repository(tmp_path)
    source = root / "op" / "puzzle" / "fused.mojo"
    source.write_text(source.read_text() + "\nnot Mojo\n")
    result = run("--fused", root=root)
    assert result.returncode == 1
    assert result.stdout.startswith("Testing with dimensions: [4, 4, 8] -> [4, 4, 16]\n")
    assert result.stderr.startswith("Loading PyTorch and MAX ...\n")
    assert "The kernels do not compile" in result.stderr
    assert "fused.mojo" in result.stderr
    assert "Traceback" not in result.stderr


def test_importing_has_no_side_effects() -> None:
    program = """
import os, runpy, warnings
import torch._dynamo
from max.experimental.torch import CustomOpLibrary

import pytest
before = dict(os.environ), list(warnings.filters), torch._dynamo.config.suppress_errors
CustomOpLibrary.__init__ = None  # loading a library would fail
runpy.run_path("solutions/p22/p22.py", run_name="imported")
assert before == (dict(os.environ), list(warnings.filters), torch._dynamo.config.suppress_errors)
"""
    result = run_python("-c", program, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_nothing_is_built_while_the_library_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: kernels of the second size were built among its times."""
    p22 = runpy.run_path(str(ROOT / "solutions/p22/p22.py"), run_name="imported")
    rows: list[int] = []

    def ours(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        rows.append(x.numel() // x.shape[-1])
        return x

    monkeypatch.setattr(fn, "fused_layernorm_linear", ours)
    scope = p22["benchmark_library"].__globals__
    monkeypatch.setitem(scope, "fitting", lambda *_: 1)
    monkeypatch.setitem(scope, "measure_in_turns", lambda *_: (rows.append(0), (1.0, 1.0))[1])
    p22["benchmark_library"](p22["SIZES"]["document"], 0, "cpu")
    assert rows == [16, 2048, 0, 0]
    assert "2048x768x3072" in capsys.readouterr().out
