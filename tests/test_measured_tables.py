"""The tables that plans choose by are what scripts make of the measurements."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("script", ["dispatch", "dispatch_cpu"])
def test_table_is_what_was_measured(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module(script)
    content = json.loads(module.MEASUREMENTS.read_text())
    calls = content["forward" if script == "dispatch" else "calls"]
    assert module.table(calls) == module.TABLE.read_text()
    assert module.table(calls[1:]) != module.TABLE.read_text()
