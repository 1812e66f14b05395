"""docs/numerics.md is what its script writes, but for the digits, which depend on the CPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_the_scripts() -> None:
    path = ROOT / "scripts/pages/numerics_page.py"
    spec = importlib.util.spec_from_file_location("numerics_page", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    measured = re.compile(r"\d\.\de-\d\d, \d\.\de-\d\d")
    page = script.PAGE.read_text()
    assert len(measured.findall(page)) == (
        len(script.DTYPES) * len(script.MEANS) * len(script.COLUMNS)
    )
    assert measured.sub("#", page) == measured.sub("#", script.page())
