"""The benchmark of choices: what it measures, and what it makes of that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import __main__ as command
from benchmarks import regret
from fused_norm.chain import library
from fused_norm.devices.costs import Measured

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


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


@pytest.mark.parametrize("name", ["cpu-regret-amd-zen5", "gpu-regret-nvidia-h200"])
def test_legend_hides_no_data_and_labels_fit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: saved.append(figure))
    given = ["--from-json", str(RESULTS / f"{name}.json"), "--plot", str(tmp_path / "regret.svg")]
    assert regret.main(given) == 0
    (figure,) = saved
    figure.draw_without_rendering()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    (box,) = (legend.get_window_extent() for legend in legends)
    assert not box.count_overlaps([axes.get_tightbbox() for axes in figure.axes])
    label = figure.axes[0].yaxis.label.get_window_extent()
    assert 0 <= label.y0 < label.y1 <= figure.bbox.height
    names = [text.get_text() for text in legends[0].get_texts()]
    assert names == list(dict.fromkeys(names))
    assert names[-1] == "float16"
