"""The examples: every version computes the same, forward and backward, and they run as they are."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accuracy import assert_within_budget
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import an example, as Python finds it when it is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in ("side_by_side", "minigpt_block", "trimul"):
        sys.modules.pop(name, None)


def results(version: Any, inputs: list[Tensor], dy: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    y = version(*inputs)
    return [y, *torch.autograd.grad(y, [inputs[0], *leaves], dy.to(y.dtype))]


def assert_versions_agree(block: Any) -> None:
    """Compare all versions with the reference in float64: the output and every gradient."""
    plain, *others = block.versions.values()
    for module in plain.modules():
        if isinstance(module, nn.LayerNorm):
            # Ones and zeros would hide a swapped or a missing one.
            nn.init.normal_(module.weight, 1.0, 0.2)
            nn.init.normal_(module.bias, 0.0, 0.2)
    exact = copy.deepcopy(plain).double()
    inputs = [block.inputs[0].requires_grad_(), *block.inputs[1:]]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    with torch.no_grad():
        dy = torch.randn_like(plain(*inputs))
    names = ["y", "grad_x", *(f"grad_{name}" for name, _ in plain.named_parameters())]
    truths = results(exact, wide, dy, list(exact.parameters()))
    bars = results(plain, inputs, dy, block.parameters)
    for version in others:
        found = results(version, inputs, dy, block.parameters)
        for name, y, truth, bar in zip(names, found, truths, bars, strict=True):
            assert_within_budget(name, y, truth, bar, 2.0)


def test_gpt_block(example: Callable[[str], ModuleType], device: str) -> None:
    minigpt = example("minigpt_block")
    assert_versions_agree(minigpt.block((2, 13), torch.device(device), torch.float32))


@pytest.mark.parametrize("options", [{"is_masked": True}, {"is_cauchy": True}], ids=str)
def test_triangle_update(
    options: dict[str, bool], example: Callable[[str], ModuleType], device: str
) -> None:
    trimul = example("trimul")
    shape = trimul.Shape(9, 2, 48, **options)
    assert_versions_agree(trimul.block(shape, torch.device(device)))


def test_a_wrong_version_is_named(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    main, block = example("side_by_side").main, example("side_by_side").Block
    weight = torch.ones((), requires_grad=True)
    versions = {"first": lambda x: x * weight, "second": lambda x: x * weight + 0.01}

    def make(tolerance: float) -> Any:
        x = torch.randn(4, 4)
        return lambda device, quick: [lambda: block("4 x 4", [x], versions, [weight], tolerance)]

    assert main("A block", make(1e-3), ["--device", "cpu", "--quick"]) == 1
    assert "WRONG: second at 4 x 4: off by up to 0.01" in capsys.readouterr().out
    assert main("A block", make(0.1), ["--device", "cpu", "--quick"]) == 0
    assert "second" in capsys.readouterr().out


@pytest.mark.parametrize("name", [pytest.param("minigpt_block", marks=pytest.mark.slow), "trimul"])
def test_example_runs(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick"]
    # PYTHONPATH: Python only searches the example's own folder if no package is installed.
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fused_norm" in done.stdout
    if not torch.cuda.is_available():
        assert "cuda: SKIPPED, PyTorch sees no GPU" in done.stdout


def test_fp8_example_stays_near_to_bfloat16() -> None:
    command = [sys.executable, str(EXAMPLES / "llama_fp8.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FP8 rowwise" in done.stdout
    assert "step 5: loss" in done.stdout


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
