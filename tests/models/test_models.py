"""Whole models that others wrote: what is fused in them, and that it computes the same."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

for needed in ("transformers", "timm", "diffusers"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: uv sync --group models")

from architectures import ARCHITECTURES  # noqa: E402
from compare import compare  # noqa: E402
from wider import WIDER  # noqa: E402
from zoo import ZOO  # noqa: E402

ROOT = Path(__file__).parents[2]
CENSUS = json.loads((ROOT / "benchmarks" / "results" / "census.json").read_text())
COUNTED = {row["model"]: row for row in CENSUS["models"]}
# One of each family and form: Conv1D, gamma around zero, experts, post-norm, views, AdaLN; a ViT,
# LLaMA, Whisper and DiT are the examples'.
SOME = [
    *("GPT-2", "GPT-J", "Gemma 2", "Mixtral", "BERT", "T5", "timm ConvNeXt"),
    *("nn.TransformerEncoder post-LN", "Flux"),
]
# Of the models' own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(n, marks=pytest.mark.slow) for n in ZOO if n not in SOME)]
)
def test_model(name: str) -> None:
    """Outputs and every gradient are those of the model untouched; no site is lost."""
    found = compare(name)
    assert found.output_error < 2e-5
    assert found.gradient_error < 1e-3
    fused = sum(site.fused for site in found.with_linear)
    reasons = [(site.path, site.reason) for site in found.with_linear if not site.fused]
    assert fused >= COUNTED[name]["fused"], reasons
    assert found.graphs == COUNTED[name]["graphs"]


def test_census_is_of_all_models() -> None:
    every = {*ZOO, *ARCHITECTURES, *WIDER}
    # A name that two files had would be counted once.
    assert len(every) == len(ZOO) + len(ARCHITECTURES) + len(WIDER)
    assert COUNTED.keys() <= every
    assert len(COUNTED) >= 200
    assert COUNTED.keys() >= ZOO.keys()
    deep = {name: row["true depth"] for name, row in COUNTED.items() if "true depth" in row}
    for total, rows in ((CENSUS["total"], COUNTED), (CENSUS["true depth"], deep)):
        assert total["models"] == len(rows)
        assert total["fused"] == sum(row["fused"] for row in rows.values())
        assert total["fused"] >= 0.97 * total["read by Linear"]
    assert all(row["output error"] < 2e-5 for row in COUNTED.values())
    assert all(row["norms"] >= COUNTED[name]["norms"] for name, row in deep.items())


def test_the_page_says_what_the_census_says() -> None:
    """`python scripts/measure/census.py --page` writes it."""
    path = ROOT / "scripts" / "measure" / "census.py"
    spec: Any = importlib.util.spec_from_file_location("census", path)
    census = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(census)
    assert census.summary(CENSUS) in (ROOT / "docs" / "models.md").read_text()
