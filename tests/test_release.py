"""What a release promises: figures in the docs that were measured, an sdist that is complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import wheel_nodes  # noqa: E402
import wheel_trial  # noqa: E402

FOUND = json.loads((ROOT / "benchmarks" / "wheel.json").read_text())
LARGEST_BYTES, LONGEST_IMPORT, LONGEST_FIRST_CALL = 15_000_000, 0.15, 0.1


def text(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def times(found: dict[str, Any], device: str) -> list[float]:
    return [dtype["first_s"] for dtype in found[device].values()]


def test_the_guide_shows_what_was_measured() -> None:
    page = (ROOT / "docs/guide/install.md").read_text()
    assert wheel_trial.table(FOUND) in page
    assert f"{FOUND['content']['bytes'] / 1e6:.1f} MB" in text("docs/guide/install.md")


def test_the_wheel_is_small_and_starts_at_once() -> None:
    assert FOUND["content"]["bytes"] < LARGEST_BYTES
    assert len(FOUND["content"]["kinds"]) > 8
    for trial in FOUND["trials"]:
        assert trial["import_s"] < LONGEST_IMPORT
        assert max(times(trial, "cpu")) < LONGEST_FIRST_CALL


def test_every_pytorch_that_has_a_node_was_tried() -> None:
    tried = {trial["node"] for trial in FOUND["trials"]}
    assert tried == {wheel_nodes.file_name(version) for version in wheel_nodes.VERSIONS}


def test_a_trial_notices_what_did_not_serve(tmp_path: Path) -> None:
    import zipfile

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
