"""The examples of whole models run as they are, and find a wrong rewrite."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
# Of the models' own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "needed", "counts"),
    [
        pytest.param("vit", "timm", "5 of 5 norms fused", marks=pytest.mark.slow),
        ("llama", "transformers", "5 of 5 norms fused"),
        pytest.param("whisper", "transformers", "12 of 12 norms fused", marks=pytest.mark.slow),
        ("dit", "diffusers", "5 of 5 norms fused"),
        ("qwen3", "transformers", "5 of 5 norms fused in 1 graph, 4 rotations of heads"),
        pytest.param("gpt2", "transformers", "5 of 5 norms fused", marks=pytest.mark.slow),
        pytest.param("bert", "transformers", "6 of 6 norms fused", marks=pytest.mark.slow),
        pytest.param("modernbert", "transformers", "6 of 6 norms", marks=pytest.mark.slow),
        pytest.param("siglip", "transformers", "5 of 6 norms fused", marks=pytest.mark.slow),
    ],
)
def test_example(
    name: str,
    needed: str,
    counts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(needed, reason=f"{needed} is not installed: uv sync --group models")
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.compiler.reset()
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert end.value.code == 0, said
    assert counts in said


def test_an_example_finds_a_wrong_rewrite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import whole_model

    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    inputs = {"input": torch.randn(3, 8)}
    assert whole_model.compare(model, inputs) == 0
    wrong = torch.nn.functional.linear
    monkeypatch.setattr(
        "fused_norm.models.emit_call.norm_linear", lambda x, w, b, **_: wrong(x, w, b)
    )
    torch.compiler.reset()
    assert whole_model.compare(model, inputs) == 1
    assert "1 of 1 norm fused" in capsys.readouterr().out


def test_whole_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's times, table and plot; what errs is not timed, and what is there stays."""
    pytest.importorskip("timm", reason="timm is not installed: uv sync --group models")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES.parent / "scripts/measure")
    import model_tables
    import whole_models

    path, page = tmp_path / "models.json", tmp_path / "models.md"
    tiny = ["--size", "tiny", "--device", "cpu", "--model", "vit", "--batch", "1"]
    tiny += ["--seconds", "0.01", "--provider", "fused_norm", "--then", "eager"]
    assert whole_models.main([*tiny, "--json", str(path), "--mode", "train"]) == 0
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        "fused_norm.models.emit_call.norm_linear", lambda x, w, b, **_: linear(x, w, b)
    )
    files = ["--json", str(path), "--table", str(page), "--plot", str(tmp_path / "models.png")]
    assert whole_models.main([*tiny, *files, "--mode", "forward", "--resume"]) == 1
    run = json.loads(path.read_text())
    train, forward = run["measurements"]
    assert (train["mode"], train["fused"], train["count"]) == ("train", "5 of 5 norms", 1)
    assert train["results"]["fused_norm"]["gradient error"] < 1e-5
    assert train["results"]["fused_norm"]["peak bytes"] > 0
    assert all(model_tables.seconds(result) > 0 for result in train["results"].values())
    assert forward["results"]["fused_norm"]["status"] == "wrong"
    assert "timings" not in forward["results"]["fused_norm"]
    shown = page.read_text()
    assert "| vit, forward | 1 | 5 of 5 |" in shown
    assert " | wrong | " in shown
    assert (tmp_path / "models.png").stat().st_size > 10000


def test_each_whole_model_says_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES.parent / "scripts/measure")
    import whole_models

    for name in whole_models.MODELS:
        example = pytest.importorskip(name, reason="uv sync --group models", exc_type=ImportError)
        _, inputs = example.build("tiny", 3)
        count = whole_models.count_of(example, inputs)
        first = next(iter(inputs.values()))
        assert count == {"images": 3, "tokens": first.numel()}.get(example.UNIT, count), name
        assert count % 3 == 0


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_pages_have_the_committed_measurements(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES.parent / "scripts/measure")
    import model_tables

    root = EXAMPLES.parent
    run = json.loads((root / f"benchmarks/results/{gpu}-models.json").read_text())
    assert model_tables.table(run) in (root / "docs/models.md").read_text()
