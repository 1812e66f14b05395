"""The worklog: its steps, its script without a GPU, its page and figures, its kernels compiled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_norm.native import build
from tutorial.worklog import worklog, worklog_diagrams, worklog_figures, worklog_page, worklog_steps

ROOT = Path(__file__).resolve().parents[2]

# What was asked for, in this order.
TOPICS = [
    *("naive", "tiled", "TMA + wgmma", "warp-specialized ring", "persistent with clusters"),
    *("no spills (SASS beside)", "epilogue", "statistics while multiplying"),
    *("centered fold with its numerics", "few rows", "backward", "hidden pass", "activation"),
    # What came after.
    "taking turns",
]
SOURCES = sorted((ROOT / "tutorial/worklog").glob("step*.mojo"))
QUICK = "step4_ring"


def test_steps_are_those_asked_for() -> None:
    assert [step.topic for step in worklog_steps.STEPS] == TOPICS
    assert [step.number for step in worklog_steps.STEPS] == list(range(1, len(TOPICS) + 1))
    assert all((ROOT / step.source).is_file() for step in worklog_steps.STEPS)
    built = [step.extension for step in worklog_steps.STEPS if step.extension]
    assert built == [source.stem for source in SOURCES]


def test_every_step_has_a_section_a_figure_and_a_link_to_its_file() -> None:
    page = worklog_page.PAGE.read_text()
    sections = re.split(r"^## ", page, flags=re.M)
    for step in worklog_steps.STEPS:
        (section,) = [s for s in sections if s.startswith(f"{step.number}. {step.title}\n")]
        assert f"(../{step.source})" in section
        assert f"(images/worklog/{step.name}.png)" in section
        assert f"(#{worklog_page.anchor(step)})" in page


def test_page_and_figures_are_up_to_date() -> None:
    data = worklog_page.load()
    page = worklog_page.PAGE.read_text()
    assert worklog_page.rendered(page, data) == page, "run poe worklog --page"
    for name in worklog_figures.FIGURES:
        image = (worklog_page.IMAGES / f"{name}.png").read_bytes()
        assert worklog_figures.digest(name, data).encode() in image, name


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [text for each in values for text in strings(each)]


def test_trials_are_those_of_the_log() -> None:
    log = (ROOT / "docs/hopper-log.md").read_text()
    sections = {s.split("\n")[0]: s for s in re.split(r"^## ", log, flags=re.M)}
    trials = json.loads(worklog_page.SOURCES["trials"].read_text())
    del trials["about"]
    for name, trial in trials.items():
        section = sections[trial["section"]]
        numbers = {key: value for key, value in trial.items() if key not in ("section", "unit")}
        for text in strings(numbers):
            found = re.search(rf"(?<![\d.]){re.escape(text)}(?![\d])", section)
            assert found, f"{name}: {text} is not in {trial['section']}"


def test_a_measurement_takes_its_place_in_the_table() -> None:
    data = worklog_page.load()
    step = worklog_steps.find("8")
    # Until it is measured, what other files know of it.
    data["results"] = {}
    before = worklog_page.row(step, data)
    times = {"step": 500.0, "cublas": 400.0, "eager": 600.0}
    measured = {**step.sizes[0]._asdict(), "us": times}
    data["results"] = {"steps": {step.name: {"measured": [measured]}}}
    after = worklog_page.row(step, data)
    assert before["mark"] != ""
    assert after["mark"] == ""
    assert after["tflops"] == pytest.approx(2 * 8192 * 4096 * 4096 / 500e-6 / 1e12)
    assert (after["of_cublas"], after["of_eager"]) == (0.8, 1.2)
    data["table"] = [worklog_page.row(each, data) for each in worklog_steps.STEPS]
    assert "| 500 | 400 | – | 80.0 | 120.0 |" in worklog_page.table(data)


def test_is_skipped_without_a_hopper_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert worklog.main(["--step", "4"]) == 0
    assert capsys.readouterr().out.startswith("SKIPPED")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert worklog.main([]) == 0
    assert capsys.readouterr().out.startswith("SKIPPED")


def test_lists_steps_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert worklog.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(TOPICS)
    with pytest.raises(SystemExit):
        worklog.main(["--step", "15"])
    assert "no step 15" in capsys.readouterr().err


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(worklog, "_environment", lambda commit: {"gpu": "none", "commit": commit})


@pytest.mark.usefixtures("pretended_gpu")
def test_a_step_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tutorial.worklog import worklog_cases

    def check(step: worklog_steps.Step, sizes: worklog_steps.Sizes) -> dict[str, float]:
        if step.name == "tiled":
            raise ValueError("wrong")
        return {"step": 1e-3, "peer": 1e-3}

    def measured(step: Any, sizes: worklog_steps.Sizes, budget: Any) -> dict[str, Any]:
        return {**sizes._asdict(), "us": {"step": 400.0, "cublas": 400.0, "eager": 440.0}}

    def run(command: list[str], *, timeout: float, **options: Any) -> Any:
        assert command[:2] == [sys.executable, str(ROOT / "tutorial/worklog/worklog.py")]
        if "ring" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, worklog.main(command[2:]))

    monkeypatch.setattr(worklog_cases, "check", check)
    monkeypatch.setattr(worklog, "_measured", measured)
    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "new" / "results.json"
    steps = ["--step", "3", "--step", "tiled", "--step", "ring", "--step", "naive"]
    assert worklog.main([*steps, "--out", str(out), "--commit", "abc"]) == 1
    said = capsys.readouterr()
    assert "failed: tiled, ring" in said.out
    assert "FAILED: ring took more than 120 s" in said.out
    assert "ValueError: wrong" in said.err
    content = json.loads(out.read_text())["steps"]
    # In the order of the page, whatever the order on the command line.
    assert list(content) == ["naive", "tensor-cores"]
    assert content["naive"]["environment"] == {"gpu": "none", "commit": "abc"}
    assert content["naive"]["measured"][0]["errors"] == {"step": 1e-3, "peer": 1e-3}
    assert worklog.main(["--step", "5", "--out", str(out)]) == 0
    assert list(json.loads(out.read_text())["steps"]) == ["naive", "tensor-cores", "clusters"]


def test_steps_import_the_library_and_what_lies_beside_them() -> None:
    beside = {path.stem for path in (ROOT / "tutorial/worklog").glob("*.mojo")}
    for path in (ROOT / "tutorial/worklog").glob("*.mojo"):
        imported = set(re.findall(r"^from (\w+)", path.read_text(), re.M))
        assert imported <= {"op", "max", "std", *beside}, path
        assert not (imported & beside) - {"entry", "tile"}, path


@pytest.mark.parametrize("band", [1, 3, 8])
def test_the_drawn_walk_meets_every_tile_once(band: int) -> None:
    rows, columns = 32, 16
    tiles = [worklog_diagrams.tile(i, rows, columns, band) for i in range(rows * columns)]
    assert len(set(tiles)) == rows * columns
    assert max(tiles) == (rows - 1, columns - 1)


def test_the_drawn_ring_keeps_its_slots_apart() -> None:
    copies, products = worklog_diagrams.schedule(4, 12)
    for block in range(12):
        assert products[block][0] >= copies[block][1]
        assert block < 4 or copies[block][0] >= products[block - 4][1]
    # With one slot, they take turns.
    copies, products = worklog_diagrams.schedule(1, 3)
    assert copies[1][0] == products[0][1]


def test_an_edit_beside_a_step_builds_it_anew(tmp_path: Path) -> None:
    source, beside = tmp_path / "step.mojo", tmp_path / "tile.mojo"
    source.write_text("from tile import TILE\n")
    beside.write_text("comptime TILE = 1\n")
    extension = build.Extension("step", "bfloat16", "nvidia:sm_90a", tmp_path)
    before = extension.path
    beside.write_text("comptime TILE = 2\n")
    build._key.cache_clear()
    assert extension.path != before


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=source.stem, marks=[] if source.stem == QUICK else pytest.mark.slow)
        for source in SOURCES
    ],
)
def test_steps_compile(source: Path, tmp_path: Path) -> None:
    library = tmp_path / "step.so"
    result = subprocess.run(
        [
            *("mojo", "build", str(source.relative_to(ROOT)), "-I", ".", "-D", "dtype=bfloat16"),
            *("--target-accelerator", "nvidia:sm_90a", "--emit", "shared-lib", "-o", str(library)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in result.stderr.splitlines() if "Crashpad" not in line]
    assert result.returncode == 0, result.stderr
    assert not said, result.stderr
    code = library.read_bytes()
    assert b".target sm_90a" in code
    assert f"PyInit_{source.stem}".encode() in code
    wgmma = code.count(b"wgmma.mma_async")
    assert (wgmma > 0) == (source.stem not in ("step1_naive", "step2_tiled"))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU on this machine",
)
@pytest.mark.parametrize("step", worklog_steps.STEPS, ids=lambda step: step.name)
def test_steps_are_right_at_ragged_sizes(step: worklog_steps.Step) -> None:
    from tutorial.worklog import worklog_cases

    for sizes in (*step.checked, worklog_steps.Sizes(321, 192, 520)):
        if step.name != "few-rows" or sizes.M <= 64:
            with torch.no_grad():
                worklog_cases.check(step, sizes)
