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
