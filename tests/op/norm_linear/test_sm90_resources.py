"""Costs that no numerical test sees: spilled registers, wgmma that wait for each other."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts/measure"))

import hopper_kernels
import kernel_resources


@pytest.fixture(scope="module")
def recorded() -> Any:
    return json.loads(hopper_kernels.RECORD.read_text())


@pytest.mark.parametrize("name", hopper_kernels.EXTENSIONS)
def test_record_is_of_these_sources(name: str, recorded: Any) -> None:
    """`python scripts/measure/hopper_kernels.py` writes another, and refuses spills."""
    extension = recorded["extensions"][name]
    assert extension["sources"] == hopper_kernels.digest(name)
    assert recorded["mojo"] == version("mojo")
    assert not hopper_kernels.faults(name, extension["kernels"])


@pytest.mark.slow
@pytest.mark.parametrize("name", hopper_kernels.EXTENSIONS)
def test_kernels_are_as_recorded(name: str, recorded: Any) -> None:
    try:
        is_as_recorded = kernel_resources.version() == recorded["ptxas"]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if not shutil.which("mojo"):
        pytest.skip("no Mojo compiler on this machine")
    found = hopper_kernels.compiled(name)
    assert not hopper_kernels.faults(name, found)
    kernels = recorded["extensions"][name]["kernels"]
    assert found.keys() == kernels.keys()
    assert found == kernels or not is_as_recorded


def test_what_a_kernel_imports_is_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("op", "fused_norm/native"):
        shutil.copytree(hopper_kernels.ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(hopper_kernels, "ROOT", tmp_path)
    before = {name: hopper_kernels.digest(name) for name in hopper_kernels.EXTENSIONS}
    with (tmp_path / "op/head/call.mojo").open("a") as file:
        file.write("# another\n")
    changed = [n for n in hopper_kernels.EXTENSIONS if hopper_kernels.digest(n) != before[n]]
    assert changed == ["head_sm90 bfloat16"]


def test_spills_and_other_products_are_faults() -> None:
    kernels = {
        "fused_norm_matrix": [168, 0, 0, 0, 1, True],
        "fused_norm_rows": [40, 8, 8, 0, 1, False],
        "fused_norm_few_rows": [40, 0, 0, 0, 1, False],
    }
    found = hopper_kernels.faults("head_sm90 bfloat16", kernels)
    assert [line.split(": ")[1].split(" ")[0] for line in found] == [
        "fused_norm_rows",
        "fused_norm_few_rows",
    ]
    assert hopper_kernels.faults("head_sm90 bfloat16", {})
