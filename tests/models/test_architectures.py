"""Sixty architectures, each by PyTorch's own rule for backends: all that aot_eager passes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

for needed in ("transformers", "timm", "torchvision"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: uv sync --group models")

from architectures import ARCHITECTURES  # noqa: E402
from suite import PASSED, Trial  # noqa: E402
from zoo import ZOO  # noqa: E402

from fused_norm.models import backend  # noqa: E402

RESULTS = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json").read_text()
)
ROWS: dict[str, dict[str, Any]] = {row["model"]: row for row in RESULTS["models"]}
MODES = ("inference", "training")
# Of the models' own.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_sixty_that_the_census_does_not_count() -> None:
    assert len(ARCHITECTURES) == 60
    assert not ARCHITECTURES.keys() & ZOO.keys()
    assert list(ROWS) == list(ARCHITECTURES)
    assert sum("fused_norm, Inductor" in row["training"] for row in ROWS.values()) >= 12


@pytest.mark.parametrize("mode", MODES)
def test_what_aot_eager_passes_passes(mode: str) -> None:
    """Of the committed results."""
    assert {row[mode]["aot_eager"] for row in ROWS.values()} > {PASSED}
    wrong = {
        (name, key): what
        for name, row in ROWS.items()
        for key, what in row[mode].items()
        if key.startswith("fused_norm") and what != PASSED and row[mode]["aot_eager"] == PASSED
    }
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str, mode: str) -> None:
    """Run again what the committed results say."""
    torch.use_deterministic_algorithms(False)
    sites: list[Any] = []
    compile_ = functools.partial(
        torch.compile,
        backend=functools.partial(backend, sites=sites),
        options={"then": "eager"},
    )
    found = Trial(name, ARCHITECTURES, mode == "training").judge(compile_)
    assert found == PASSED or ROWS[name][mode]["aot_eager"] != PASSED, found
    assert sum(site.fused for site in sites) >= ROWS[name][mode]["fused"]
