"""scripts/fp8_curve.py: trainings of a model with one wide layer, stopped and resumed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fused_norm.models import precision

pytest.importorskip("torchao.float8")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import fp8_curve

    return fp8_curve


def arguments(folder: Path, *more: str) -> list[str]:
    where = ["--out", str(folder / "out"), "--checkpoints", str(folder / "checkpoints")]
    return [*where, "--size", "tiny", "--device", "cpu", *more]


def test_trainings_stopped_and_resumed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "CHARACTERS", 100_000)
    # Narrower than what the backend has in FP8 elsewhere, which a CPU takes a minute for.
    monkeypatch.setattr(precision, "SMALLEST", 256)
    monkeypatch.setitem(script.SIZES, "tiny", dataclasses.replace(script.SIZES["tiny"], width=256))
    steps = ["--steps", "3"]
    # Each call takes a step.
    assert script.main(arguments(tmp_path, *steps, "--seconds", "0")) == 130
    stopped = torch.load(tmp_path / "checkpoints/bfloat16.pt")["curve"]["losses"]
    assert len(stopped) == 1
    out = tmp_path / "out"
    assert script.main(arguments(tmp_path, *steps, "--only", "torchao")) == 0
    assert [path.name for path in out.iterdir()] == ["torchao.json"]
    assert script.main(arguments(tmp_path, *steps)) in (0, 1)
    content: dict[str, Any] = json.loads((out / "fp8-curve.json").read_text())
    losses = content["losses"]
    assert set(losses) == set(script.RUNS)
    assert {len(each) for each in losses.values()} == {3}
    assert losses["bfloat16"][0] == pytest.approx(stopped[0], abs=1e-4)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert (out / "fp8-curve.png").stat().st_size > 5000
    # The same start and the same text, in other precisions.
    plain, ours, theirs = (losses[name] for name in ("bfloat16", "fused_norm", "torchao"))
    for other in (ours, theirs):
        assert other == pytest.approx(plain, abs=0.02)
        assert other != plain
    assert ours != theirs
    assert abs(losses["bfloat16-again"][0] - plain[0]) > 0.03


def test_a_worse_training_is_said_to_be(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {name: getattr(script.SIZES["tiny"], name) for name in script.Size.__annotations__}
    out = tmp_path / "out"
    out.mkdir()
    for last, expected in ((2.03, 0), (2.2, 1)):
        values = {"bfloat16": 2.0, "bfloat16-again": 2.02, "fused_norm": last, "torchao": 2.0}
        for name, loss in values.items():
            curve = {"losses": [loss] * 20, "seconds": [1.0] * 20, "memory": None}
            content = {"environment": {}, "size": size, "recipe": "rowwise", "curve": curve}
            (out / f"{name}.json").write_text(json.dumps(content))
        assert script.main(arguments(tmp_path)) == expected
    assert "above both" in capsys.readouterr().out


def test_the_model_has_a_hundred_million_parameters(script: ModuleType) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import gpt
    with torch.device("meta"):
        model = gpt.GPT(script.SIZES["gpt"], script.VOCABULARY, torch.bfloat16, gpt.norm_linear)
    assert sum(p.numel() for p in model.parameters()) > 100e6
    assert script.SIZES["gpt"].steps == 2000


def test_seeds_have_other_batches(script: ModuleType) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import gpt
    text = torch.arange(10_000)
    one, other = (gpt.batch(text, script.SIZES["tiny"], seed, 0, 0, 1) for seed in (0, 1))
    assert not torch.equal(one, other)
