"""`poe bench --fp8` on results that are there: its table and its plot, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fp8
from benchmarks.png import description, digest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks/results").glob("h?00-fp8-blocks.json"))


def test_there_are_results_of_both() -> None:
    assert [path.name[:4] for path in RESULTS] == ["h100", "h200"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_plot_of_the_page_is_of_these_results(path: Path) -> None:
    """Made again by `poe bench --fp8 --from-json PATH --plot docs/images/NAME.png`."""
    assert description(ROOT / f"docs/images/{path.stem}.png") == digest(path)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = json.loads(RESULTS[1].read_text())
    run["cases"] = [case for case in run["cases"] if case["block"] == "llama-8b"]
    # One that did not run has no place.
    run["cases"][0]["results"]["compile"] = {"error": "out of memory"}
    source, image = tmp_path / "some.json", tmp_path / "some.png"
    source.write_text(json.dumps(run))
    assert fp8.main(["--from-json", str(source), "--plot", str(image)]) == 0
    assert "fused_norm rowwise, frozen" in " ".join(capsys.readouterr().out.split())
    assert image.stat().st_size > 10_000
    assert description(image) == digest(source)
