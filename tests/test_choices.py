"""The table by which the forward on Hopper chooses its way."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fused_norm import _choices

ROOT = Path(__file__).parent.parent


def test_table_is_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("dispatch", ROOT / "scripts" / "dispatch.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    measured = json.loads((ROOT / "benchmarks" / "results" / "h200-dispatch.json").read_text())
    assert script.table(measured["forward"]) == _choices.FASTEST
    assert script.ROWS == _choices.ROWS


@pytest.mark.parametrize(
    ("shape", "in_graph", "has_fold", "way"),
    [
        # Sizes that were measured, then some between them and beyond.
        ((8192, 4096, 4096), False, True, "k"),
        ((64, 4096, 12288), True, True, "t"),
        ((1024, 768, 2304), True, False, "t"),
        ((1576, 768, 3072), True, True, "t"),
        ((20000, 1024, 1280), True, False, "a"),
        ((1, 8, 8), False, False, "c"),
    ],
)
def test_nearest_measurement_counts(
    shape: tuple[int, int, int], in_graph: bool, has_fold: bool, way: str
) -> None:
    assert _choices.fastest(*shape, in_graph, has_fold) == way
