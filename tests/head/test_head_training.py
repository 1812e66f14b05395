"""The script that measures training with and without the head: what it writes, what it refuses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import fused_norm as fn

pytest.importorskip("transformers", reason="uv sync --group models")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts/measure")
    return importlib.import_module("head_training")


def arguments(folder: Path, *more: str) -> list[str]:
    tiny = ["--size", "tiny", "--seconds", "0.01", "--device", "cpu", "--dtype", "float32"]
    files = ["--json", str(folder / "run.json"), "--table", str(folder / "run.md")]
    return [*tiny, *files, "--provider", "eager-head", *more]


def test_providers_are_measured(script: Any, tmp_path: Path) -> None:
    assert script.main(arguments(tmp_path)) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert [m["model"] for m in run["measurements"]] == list(script.LARGE)
    for m in run["measurements"]:
        assert list(m["results"]) == ["eager", "eager-head"]
        eager, head = m["results"].values()
        assert head["distance"] < 1e-5
        assert head["peak bytes"] < eager["peak bytes"]
    table = (tmp_path / "run.md").read_text()
    assert table.count("`eager-head`") == 3
    (tmp_path / "run.md").unlink()
    assert script.main(arguments(tmp_path, "--only-show")) == 0
    assert (tmp_path / "run.md").read_text() == table


def test_what_errs_is_not_timed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fn.linear_cross_entropy
    monkeypatch.setattr(fn, "linear_cross_entropy", lambda *a: right(*a) * 1.1)
    assert script.main(arguments(tmp_path, "--model", "gpt2")) == 1
    (m,) = json.loads((tmp_path / "run.json").read_text())["measurements"]
    assert m["results"]["eager-head"]["status"] == "wrong"
    assert "seconds" not in m["results"]["eager-head"]
