"""What a release promises: figures in the docs that were measured, an sdist that is complete."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/wheel"))

import wheel_nodes  # noqa: E402
import wheel_trial  # noqa: E402

from benchmarks import markdown  # noqa: E402
from fused_norm.chain import library  # noqa: E402

FILE = ROOT / "benchmarks" / "results" / "wheel.json"
LARGEST_BYTES = 14_000_000
# Twice what they should take: others may have shared the machine.
LONGEST_IMPORT, LONGEST_FIRST_CALL = 0.3, 0.2


@pytest.fixture
def found() -> Any:
    if not FILE.is_file():
        pytest.skip("no wheel has been tried: scripts/wheel/wheel_trial.py writes wheel.json")
    return json.loads(FILE.read_text())


def test_the_guide_shows_what_was_measured(found: Any) -> None:
    page = wheel_trial.PAGE.read_text()
    assert page == markdown.filled(page, {"wheel": wheel_trial.figures(found)})


def test_results_name_the_commit_of_the_wheel(found: Any) -> None:
    trials = json.loads((FILE.parent / "clean-trials.json").read_text())["trials"]
    for commit in {found["commit"], *(trial["commit"] for trial in trials)}:
        assert re.fullmatch("[0-9a-f]{12}", commit), commit


def test_the_wheel_is_small_and_starts_at_once(found: Any) -> None:
    assert found["content"]["bytes"] < LARGEST_BYTES
    kinds = found["content"]["kinds"]
    assert {"kernels v3", "kernels v4", "kernels amx", "runtime", "nodes"} < set(kinds)
    for name, kind in kinds.items():
        if "sm_" in name:
            assert kind["kernels"] == kind["cubins"] > 0
    for trial in found["trials"]:
        assert trial["import_s"] < LONGEST_IMPORT
        assert max(dtype["first_s"] for dtype in trial["cpu"].values()) < LONGEST_FIRST_CALL


def test_every_pytorch_that_has_a_node_was_tried(found: Any) -> None:
    tried = {trial["node"] for trial in found["trials"]}
    assert tried == {library.file_name(library.NODE, version) for version in wheel_nodes.VERSIONS}


def test_a_trial_notices_what_did_not_serve(tmp_path: Path) -> None:
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fused_norm/prebuilt/node-torch-2.15.so", "")
        archive.writestr("fused_norm/prebuilt/norm_linear_cpu-float32-v3.so", "")
    said = {"torch": "2.15.0", "node": "/a/node-torch-2.15.so", "cpu": {"float32": {}}}
    wheel_trial._compare(dict(said), "autograd  C++, prebuilt", path)
    with pytest.raises(RuntimeError, match="Python's serves, not node-torch-2"):
        wheel_trial._compare({**said, "node": None}, "autograd  Python", path)
    with pytest.raises(RuntimeError, match="came for this CPU, not"):
        wheel_trial._compare({**said, "cpu": {}}, "autograd  C++, prebuilt", path)
