"""The driver of the Spiral LayerNorms as a user starts it: what it prints and how it exits."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from processes import run_script
from test_puzzle_driver import assert_is_refused, copy_repository

GPU_VERDICT = "OK CORRECT" if torch.cuda.is_available() else r"SKIPPED \(no GPU\)"
SMALL = ("--batch", "2", "--seq", "3", "--hidden", "50")

# A fault that a kernel could have: the gradient of o without its sign.
FAULT = ("-o * along_v * row.n", "o * along_v * row.n")


run = functools.partial(run_script, "solutions/layernorm/layernorm.py")


@pytest.mark.parametrize("mode", ["fused", "unfused"])
def test_forward(mode: str) -> None:
    result = run(f"--{mode}", *SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr.startswith("Loading PyTorch ...\n")
    for line in (
        r"Testing with dimensions: \[2, 3, 50\], o = 0.25",
        rf"OK Using Mojo {mode} kernels \(CPU\)",
        r"   - Reference: +OK CORRECT",
        rf"   - CPU {mode}: +OK CORRECT",
        rf"   - GPU {mode}: +{GPU_VERDICT}",
        r"   Overall Correctness: OK ALL CORRECT",
        r"   composed: \d+\.\d\dms \(50 iterations\)",
        r"   fused takes \d\.\d\d of the time of F\.layer_norm",
    ):
        assert re.search(f"^{line}$", result.stdout, re.MULTILINE), line


def test_backward() -> None:
    result = run("--backward", *SMALL, "--o", "-1.5", "--seed", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    devices = 1 + torch.cuda.is_available()
    assert len(re.findall(r"^   grad_x: \S+ OK$", result.stdout, re.MULTILINE)) == 2 * devices
    assert len(re.findall(r"^   grad_o: \S+ OK$", result.stdout, re.MULTILINE)) == devices
    assert "forward and backward" in result.stdout


@pytest.mark.slow
def test_fails_when_a_kernel_is_wrong(tmp_path: Path) -> None:
    root = copy_repository(tmp_path / "copy")
    source = root / "op/rows/programs/trainable_eps.mojo"
    text = source.read_text()
    assert text.count(FAULT[0]) == 1
    source.write_text(text.replace(*FAULT))
    cache = {"FUSED_NORM_CACHE_DIR": str(tmp_path / "cache")}
    result = run("--backward", *SMALL, root=root, **cache)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"^   grad_x: \S+ OK$", result.stdout, re.MULTILINE)
    assert re.search(r"^   grad_o: \S+ INCORRECT$", result.stdout, re.MULTILINE)
    assert re.search(r"^   - CPU fused: +INCORRECT$", result.stdout, re.MULTILINE)
    assert re.search(r"^   - CPU unfused: +OK CORRECT$", result.stdout, re.MULTILINE)
    assert "Overall Correctness: SOME INCORRECT" in result.stdout
    assert "iterations" not in result.stdout


def test_says_that_kernels_do_not_compile(tmp_path: Path) -> None:
    root = copy_repository(tmp_path / "copy")
    with (root / "op/rows/programs/trainable_eps.mojo").open("a") as source:
        source.write("\nnot Mojo\n")
    result = run("--fused", *SMALL, root=root)
    assert result.returncode == 1
    assert "The kernels do not compile" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--hidden", "1", "sizes must be"),
        ("--batch", "0", "sizes must be"),
        ("--seq", "999999999", "at most"),
    ],
)
def test_refuses_sizes_before_anything_else(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_is_refused("layernorm/layernorm.py", ["--fused", option, value], message, capsys)
