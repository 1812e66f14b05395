"""The comparison of two checkouts on a GPU, tried on a CPU with this checkout twice."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ROW = {"op": "layernorm_linear", "shape": [16, 8, 16], "mode": "train", "dtype": "float32"}


@pytest.fixture
def gpu_times(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts/measure")
    return importlib.import_module("gpu_times")


@pytest.fixture
def processes(gpu_times: ModuleType) -> Iterator[dict[str, Any]]:
    with gpu_times.Process(ROOT, "cpu") as before, gpu_times.Process(ROOT, "cpu") as after:
        yield {"before": before, "after": after}


def test_both_checkouts_time_a_row_in_turns(
    gpu_times: ModuleType, processes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = ROW | {"providers": ["fused_norm", "eager"]}
    found = row | gpu_times.measured(processes, row, 0.0, random.Random(0))
    assert found["rounds"] == gpu_times.FEWEST_ROUNDS
    (line,) = gpu_times.compared(found)
    assert line["metric"] == "wall"
    assert all(us > 0 for us in (line["eager"], line["before"], line["after"]))
    assert line["after / eager"] == pytest.approx(line["after"] / line["eager"])
    # One that is not installed ends its row, and no other.
    with pytest.raises(RuntimeError, match=r"KeyError: .*nobody"):
        gpu_times.measured(processes, row | {"providers": ["nobody", "eager"]}, 0.0, random)
    monkeypatch.setattr(gpu_times, "MOST_DEVIATION", -1.0)
    with pytest.raises(RuntimeError, match=r"before's fused_norm is .* off eager"):
        gpu_times.measured(processes, row, 0.0, random.Random(0))


def test_gradients_of_training_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts/measure")
    side = importlib.import_module("gpu_times_side")
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (gradient,) = side.step_of((lambda: (x * x,), [x]), "train", [torch.ones(2)])()
    assert gradient.tolist() == [6.0, 8.0]
    assert side.deviation(gradient, torch.tensor([6.0, 8.0])) == 0
    assert side.deviation(torch.tensor([0.0, 8.0]), gradient) == pytest.approx(0.6)
    assert not side.deviation(torch.tensor([torch.nan, 8.0]), gradient) <= 1


def test_table_compares_like_with_like(gpu_times: ModuleType) -> None:
    us = {
        "before, fused_norm": {"launch": 20.0, "graph": 8.0},
        "after, fused_norm": {"launch": 15.0, "graph": 8.0},
        "before, eager": {"launch": 40.0},
        "after, eager": {"launch": 30.0},
    }
    row = ROW | {"providers": ["fused_norm", "eager"], "us": us}
    run = {
        "environment": {"gpu": "NVIDIA H100", "torch": "2.11", "driver": "580", "date": "today"},
        "commits": {"before": "aaa", "after": "bbb"},
        "rows": [row, ROW | {"providers": ["fused_norm", "eager"], "error": "the time was over"}],
    }
    text = gpu_times.table(run)
    # Eager has no graph here, so there is nothing to compare that one with.
    assert text.count("layernorm_linear") == 1
    cells = "| layernorm_linear 16x8x16 | train | launched | 30.0 | 20.0 | 15.0 | 0.750 | 0.500 |"
    assert text.endswith(cells)
    assert "before is aaa, after bbb" in text


def test_log_has_what_was_measured(gpu_times: ModuleType) -> None:
    run = json.loads((ROOT / "benchmarks/results/h100-before-after.json").read_text())
    assert gpu_times.table(run) in (ROOT / "docs/hopper-log.md").read_text()
