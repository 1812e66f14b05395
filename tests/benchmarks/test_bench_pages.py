"""What is made of results: plots, the benchmarks page, a round on a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_cases import SHAPE, plan, provider, right, without_bias
from torch import Tensor

from benchmarks import command_line, plots, runs
from benchmarks.ops import OPS
from benchmarks.plan import Listener
from benchmarks.runner import Runner
from benchmarks.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "scripts/pages/benchmark_page.py"


def test_plots_show_something(tmp_path: Path, registry: Callable[..., None]) -> None:
    import matplotlib.image

    shapes_ = (SHAPE, Shape(48, 64, 32), Shape(7, 9, 11))
    registry(provider("fused_norm", right, role="ours"), provider("other", right))
    run = Runner(plan(*shapes_), Listener()).execute()
    written = plots.write(run, tmp_path)
    assert [path.stem.removeprefix("layernorm_linear-float32-") for path in written] == [
        "ratio-wall",
        "time",
        "memory",
    ]
    for path in written:
        picture = matplotlib.image.imread(path)
        assert picture.shape[0] > 300
        assert picture.shape[1] > 600
        ours = torch.tensor(picture[..., :3]) - torch.tensor([0xD1, 0x49, 0x5B]) / 255
        # Our dots, three in each of two columns.
        assert int((ours.abs().amax(-1) < 0.02).sum()) > 200


@pytest.fixture(autouse=True)
def siblings_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (PAGE.parent, ROOT / "scripts"):
        monkeypatch.syspath_prepend(folder)


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_follows_the_results(
    tmp_path: Path, registry: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*inputs: Tensor) -> Tensor:
        time.sleep(0.002)
        return right(*inputs)

    registry(provider("fused_norm", slow, role="ours"), provider("bad", without_bias))
    made = Runner(plan(), Listener()).execute()
    path = tmp_path / "results/machine.json"
    runs.save(made, path)
    page_script = _script(PAGE)
    where = ["--results", str(path.parent), "--docs", str(tmp_path / "docs")]
    assert page_script.main([*where, "--check"]) == 1
    assert page_script.main(where) == 0
    assert page_script.main([*where, "--check"]) == 0

    page = (tmp_path / "docs/benchmarks/cpus.md").read_text()
    saved = runs.load(path)
    for measurement in saved.measurements:
        ratio = measurement.of("fused_norm").vs_eager["wall"]
        assert f"| **{ratio:.2f}** | wrong |" in page
        name = f"| layernorm_linear {measurement.mode} float32 24x32x40 | fused_norm, wall |"
        assert f"{name} {ratio:.2f} |" in page
    assert "y is off by" in page
    assert "y is off by" not in (tmp_path / "docs/benchmarks/h200.md").read_text()
    assert "(benchmarks/cpus.md)" in (tmp_path / "docs/benchmarks.md").read_text()
    images = sorted((tmp_path / "docs/images/benchmarks").glob("*.png"))
    assert [f"../images/benchmarks/{image.name}" in page for image in images] == [True] * 3

    data = json.loads(path.read_text())
    data["measurements"][0]["results"][1]["vs_eager"]["wall"] = 0.5
    path.write_text(json.dumps(data))
    capsys.readouterr()
    assert page_script.main([*where, "--check"]) == 1
    stale = capsys.readouterr().err
    assert "was not drawn from machine.json" in stale
    assert "is not what the results give" in stale


def test_round_of_the_family_measures_every_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU machine is asked for every op at the named shapes, in command lines that hold."""
    script = _script(ROOT / "scripts/gpu_round.py")
    commands: list[list[str]] = []
    monkeypatch.setattr(script, "_logged", lambda command, *_: commands.append(command) or 0)
    (tmp_path / "commit").write_text("abc\n")
    (tmp_path / "h200-norm_mlp.json").write_text("{}")
    options = argparse.Namespace(folder=tmp_path, out=tmp_path / "out", name="h200")
    options.op, options.no_compile, options.seconds = None, True, 0.2
    options.out.mkdir()
    assert script._family(options, {}, 600.0) == 0
    made = [command_line.parser().parse_args(command[3:]) for command in commands]
    assert {op for each in made for op in each.op} == set(OPS) - {"layernorm_linear", "layer_norm"}
    for each in made:
        assert each.json == options.out / f"h200-{each.op[0]}.json"
        assert (each.shapes, each.dtype, each.mode) == (
            ["named"],
            ["bfloat16"],
            ["forward", "train"],
        )
        assert "compile" not in each.provider
        assert each.time_limit < 600
    # What was measured before is gone on with.
    assert [path.name for path in options.out.iterdir()] == ["h200-norm_mlp.json"]
    assert script._family(options, {}, 30.0) == 0
    assert len(commands) == len(made)


@pytest.mark.skipif(
    not list((ROOT / "benchmarks/results/ops").glob("*.json")), reason="no results are committed"
)
def test_committed_page_follows_the_committed_results() -> None:
    assert _script(PAGE).main(["--check"]) == 0
