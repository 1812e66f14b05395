"""The benchmark of choices: what it measures, and what it makes of that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import regret
from fused_norm.chain import library
from fused_norm.devices.costs import Measured


def test_ratios() -> None:
    us = {"eager": 10.0, "fused": 8.0, "around": 9.0, "chosen": 12.0}
    call = Measured("float32", "", "forward", 1, 3, 4, 5, us)
    assert regret.regret(call) == 1.5
    assert regret.of_eager(call) == 1.2
    cells = [column._cells for column in regret.table([call]).columns]
    assert cells[3:] == [["1.500"], ["1.50"], ["3,4,5 "], ["1.200"], ["1.20"], ["3,4,5 "]]


@pytest.mark.as_dispatched
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.load() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr("fused_norm.tuning.sizes.MOST_PRODUCTS", 2**22)
    out, plot = tmp_path / "regret.json", tmp_path / "regret.svg"
    arguments = ["--count", "2", "--seconds", "0.01", "--dtype", "float32", "--seed", "5"]
    arguments += ["--json", str(out), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--regret", *arguments])
    assert command.main() == 0
    found = json.loads(out.read_text())
    assert "--regret" in found["environment"]["command"]
    assert found["fields"] == list(Measured._fields)
    calls = [Measured(*each) for each in found["calls"]]
    assert [call.direction for call in calls] == ["forward", "training"] * 2
    assert all(call.us.keys() == {"eager", "fused", "around", "chosen"} for call in calls)
    assert all(us > 0 for call in calls for us in call.us.values())
    assert "</svg>" in plot.read_text()
