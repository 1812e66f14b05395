"""The worklog: its steps, its script without a GPU, its page and figures, its kernels compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ON_HOPPER

from benchmarks import environment
from benchmarks.runs import Ceiling
from benchmarks.timing import Budget
from fused_norm.native import build
from tutorial.worklog import (
    worklog,
    worklog_diagrams,
    worklog_figures,
    worklog_model,
    worklog_page,
    worklog_rounds,
    worklog_steps,
)

ROOT = Path(__file__).resolve().parents[2]

# What was asked for, in this order.
TOPICS = [
    *("naive", "tiled", "TMA + wgmma", "warp-specialized ring", "persistent with clusters"),
    *("no spills (SASS beside)", "epilogue", "statistics while multiplying"),
    # What came after, in front of the steps that rest on it.
    "ping-pong",
    *("centered fold with its numerics", "few rows", "backward", "hidden pass", "activation"),
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


def test_page_has_one_time_of_a_kernel_at_some_sizes() -> None:
    """Those of the first table are in the table of all sizes, with the same denominator."""
    data = worklog_page.load()
    sizes = worklog_page.sizes(data)
    for step, row in zip(worklog_steps.STEPS, data["table"], strict=True):
        speed = f"{row['us']:.1f} | {row['tflops']:.0f} | {100 * row['of_cublas']:.1f}"
        assert f"| {step.number} {step.name} | {step.sizes[0]} | {speed} |" in sizes
    steps = {row["name"]: row for row in data["table"]}
    both = f"{steps['clusters']['us']:.1f} | {steps['no-spills']['us']:.1f}"
    assert f"| 8192,4096,4096 | 8 | {both} |" in worklog_page.storing(data)


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


def test_forwards_have_one_denominator_that_of_their_rounds() -> None:
    data = worklog_page.load()
    names = [step.name for step in worklog_steps.GROUPS["forward"]]
    peers = {"cublas": 400.0, "eager": 600.0, "eager-activation": 700.0}
    sizes = worklog_steps.HEADLINE._asdict()
    data["results"] = {
        "together": {"forward": {**sizes, "us": dict.fromkeys(names, 500.0) | peers}},
        "steps": {
            name: {"measured": [{**sizes, "us": {"step": us, "cublas": 1.0, "eager": 1.0}}]}
            for name, us in (("tiled", 8000.0), ("ping-pong", 1.0))
        },
    }
    rows = {step.name: worklog_page.row(step, data) for step in worklog_steps.STEPS}
    assert rows["ping-pong"]["tflops"] == pytest.approx(2 * 8192 * 4096 * 4096 / 500e-6 / 1e12)
    assert [rows[name]["of_cublas"] for name in names] == [0.8] * len(names)
    assert rows["tiled"]["of_cublas"] == 0.05
    assert (rows["ping-pong"]["of_eager"], rows["activation"]["of_eager"]) == (1.2, 1.4)
    assert rows["ring"]["of_eager"] is None
    assert rows["backward"]["us"] is None
    data["table"] = list(rows.values())
    assert "| 500 | 550 | 80.0 | 120.0 |" in worklog_page.table(data)
    assert "| not measured yet | not measured yet |" in worklog_page.table(data)
    data["results"] = {}
    assert "not measured yet" in worklog_page.rounds(data)


class _WallTimer:
    """A stand-in for a timer of graphs without a GPU."""

    def __init__(self, steps: Sequence[Any], stream: object) -> None:
        self.steps = steps

    def warm_up(self, seconds: float) -> None:
        for step in self.steps:
            step()

    def sample(self) -> dict[str, float]:
        return {"graph": self.steps[0]()}


def test_steps_are_interleaved_and_one_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tutorial.worklog import worklog_cases

    def runs(step: worklog_steps.Step, inputs: str) -> dict[str, Any]:
        def own() -> float:
            if step.name == "ring":
                raise ValueError("wrong")
            return 1e-6

        eager = 4e-6 if step.kind == "activation" else 3e-6
        return {"step": own, "cublas": lambda: 2e-6, "eager": lambda: eager}

    monkeypatch.setattr(worklog_cases, "runs", runs)
    monkeypatch.setattr(worklog_cases.Inputs, "random", lambda sizes: "inputs")
    for name in ("Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(worklog_rounds, "GraphTimer", _WallTimer)
    monkeypatch.setattr(worklog_rounds.environment, "clocks", lambda device: "1500 MHz, 2 MHz")
    budget = Budget(0.05, 0.0, fewest=3)
    steps = worklog_steps.GROUPS["forward"]
    found, failures = worklog_rounds.together(steps, budget)
    assert list(failures) == ["ring"]
    own = {step.name: 1.0 for step in steps if step.name != "ring"}
    assert found["us"] == own | {"cublas": 2.0, "eager": 3.0, "eager-activation": 4.0}
    assert found["mhz"] == 1500
    alone = worklog_rounds.measured(worklog_steps.find("activation"), steps[0].sizes[0], budget)
    assert alone["us"] == {"step": 1.0, "cublas": 2.0, "eager": 4.0}
    with pytest.raises(ValueError, match="wrong"):
        worklog_rounds.measured(worklog_steps.find("ring"), steps[0].sizes[0], budget)


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
    monkeypatch.setattr(worklog_rounds, "measured", measured)
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


@pytest.mark.usefixtures("pretended_gpu")
def test_a_run_of_all_ends_with_the_rounds_that_they_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(" ".join(command[2 : command.index("--seconds")]))
        return subprocess.CompletedProcess(command, int("--together" in command))

    monkeypatch.setattr(subprocess, "run", run)
    assert worklog.main(["--out", str(tmp_path / "results.json")]) == 1
    names = [step.name for step in worklog_steps.STEPS]
    assert asked == [*(f"--step {name}" for name in names), "--together"]
    monkeypatch.setattr(worklog_rounds, "together", lambda steps, budget: ({"us": {}}, {}))
    ceiling = Ceiling("bfloat16", 7e14, 3e12)
    monkeypatch.setattr(environment, "ceiling", lambda dtype, device: ceiling)
    out = tmp_path / "results.json"
    assert worklog.main(["--together", "--out", str(out), "--commit", "abc"]) == 0
    written = json.loads(out.read_text())
    assert written["ceilings"] == {"bfloat16": dataclasses.asdict(ceiling)}
    found = written["together"]
    assert found.keys() == worklog_steps.GROUPS.keys()
    assert found["step"]["environment"] == {"gpu": "none", "commit": "abc"}


def test_steps_import_the_library_and_what_lies_beside_them() -> None:
    beside = {path.stem for path in (ROOT / "tutorial/worklog").glob("*.mojo")}
    for path in (ROOT / "tutorial/worklog").glob("*.mojo"):
        imported = set(re.findall(r"^from (\w+)", path.read_text(), re.M))
        assert imported <= {"op", "max", "std", *beside}, path
        assert not (imported & beside) - {"entry", "normalized", "tile"}, path


def test_models_are_those_of_the_library_and_of_the_log() -> None:
    found = worklog_model.models(bytes_per_cycle=2500.0)
    tiling = (ROOT / "op/gemm/sm90/tiling.mojo").read_text()
    assert f"comptime STORE_CYCLES = {worklog_model.STORE}" in tiling
    columns, permille = worklog_model.PING_PONG, worklog_model.NARROW * 1000
    assert f"Shape({columns}, True, {permille:.0f})" in tiling
    log = (ROOT / "docs/hopper-log.md").read_text()
    assert f"cuBLAS needs {worklog_model.CUBLAS:,} cycles" in log
    # 7.76 waves of tiles, the last one counted in full.
    assert found["ring"].cycles == 8 * 64 * 1024
    assert found["no-spills"].cycles == found["ring"].cycles + 8 * 4400
    reads = found["epilogue"].cycles - found["statistics"].cycles
    assert reads == pytest.approx(2 * 8192 * 4096 / 2500)
    assert found["ping-pong"].cycles < found["epilogue"].cycles
    data = worklog_page.load()
    data["table"] = [{"name": "no-spills", "of_cublas": 0.5, "cublas_us": 400.0}]
    assert "| 6 | no-spills | 1118 | 559 |" in worklog_model.table(data)
    data["table"] = []
    assert "not measured yet" in worklog_model.table(data)


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
    # With one slot, they alternate.
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
@ON_HOPPER
@pytest.mark.parametrize("step", worklog_steps.STEPS, ids=lambda step: step.name)
def test_steps_are_right_at_ragged_sizes(step: worklog_steps.Step) -> None:
    from tutorial.worklog import worklog_cases

    for sizes in (*step.checked, worklog_steps.Sizes(321, 192, 520)):
        if step.name != "few-rows" or sizes.M <= 64:
            with torch.no_grad():
                worklog_cases.check(step, sizes)
