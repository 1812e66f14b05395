"""What docs/models.md says of norms in front of torchao's int8 weight-only layers."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
# `python scripts/measure/weight_only.py --json FILE` writes it.
CASES = json.loads((ROOT / "benchmarks/results/cpu-weight-only.json").read_text())["cases"]


def test_the_page_says_what_was_measured() -> None:
    page = " ".join((ROOT / "docs/models.md").read_text().split())
    before = _range("ours", "inductor"), _range("ours", "eager")
    assert f"it takes {before[0]} of the time before Inductor, and {before[1]} with `" in page
    assert f"the same model again takes {_range('control')} (" in page


def test_a_pass_of_ours_is_never_faster() -> None:
    """Otherwise the backend should emit it."""
    assert len(CASES) == 12
    assert all(case["ours"] >= 1.0 for case in CASES)


def _range(name: str, then: str = "") -> str:
    found = [case[name] for case in CASES if then in ("", case["then"])]
    return f"{min(found):.2f} to {max(found):.2f}"
