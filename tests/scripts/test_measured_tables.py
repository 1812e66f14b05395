"""The tables that plans choose by are what scripts make of the measurements."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_table_of_hopper_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts/measure")
    dispatch = importlib.import_module("dispatch")
    calls = json.loads(dispatch.MEASUREMENTS.read_text())["forward"]
    assert dispatch.table(calls) == dispatch.TABLE.read_text()
    assert dispatch.table(calls[1:]) != dispatch.TABLE.read_text()


def test_table_of_cpus_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts/measure")
    dispatch = importlib.import_module("dispatch_cpu")
    assert dispatch.table() == dispatch.TABLE.read_text()
    file_of = dispatch.file_of
    for level in dispatch.LEVELS:
        less = json.loads(file_of(level).read_text())
        del less["calls"][0]
        changed = tmp_path / level
        changed.write_text(json.dumps(less))
        monkeypatch.setattr(
            dispatch,
            "file_of",
            lambda each, of=level, to=changed: to if each == of else file_of(each),
        )
        assert dispatch.table() != dispatch.TABLE.read_text()
