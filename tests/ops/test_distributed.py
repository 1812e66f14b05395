"""The op family in two processes: DTensors, tensor parallel, DDP and FSDP2, against one process.

Both processes run all cases of `distributed_worker.py` that are asked for, one after another: most
of the time goes into starting them.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import distributed_cases
import pytest
import torch.distributed as dist
from processes import run_forks

if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
# They compile, or differ from others in little.
SLOW = [
    name
    for name in distributed_cases.NAMES
    if ("; compiled" in name and name != "residual; rows of tokens; compiled")
    or name.startswith(("AdaLN by place", "GELU"))
    or "rows of samples" in name
    or (name.startswith("FP8") and "; rowwise;" not in name and "accumulation" not in name)
    or (name.startswith("gathered in FP8") and name.endswith(("maxima", "whole", "bfloat16")))
    or name.endswith(
        ("; FSDP2; checkpoint", "; DDP; reentrant checkpoint", "rowwise; FSDP2; backend")
    )
]


@pytest.fixture(scope="session")
def said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return what went wrong in each case, in either process."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_two_processes_as_one.__name__
    ]
    folder = tmp_path_factory.mktemp("distributed")
    run_forks("distributed_worker.py", str(folder), *names)
    found: dict[str, str] = {}
    for rank in range(2):
        for name, wrong in map(json.loads, (folder / f"{rank}.jsonl").read_text().splitlines()):
            found[name] = found.get(name, "") + wrong
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in distributed_cases.NAMES
    ],
)
def test_two_processes_as_one(name: str, said: dict[str, str]) -> None:
    if name.startswith("gathered in FP8"):
        pytest.importorskip("torchao.float8")
    assert said[name] == ""


@pytest.fixture
def tensor_parallel(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts/measure")
    return importlib.import_module("tensor_parallel")


@pytest.mark.slow
def test_a_tensor_parallel_block_trains(tensor_parallel: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    tiny = ["--size", "tiny", "--device", "cpu", "--then", "eager", "--steps", "2", "--rounds", "1"]
    assert tensor_parallel.main([*tiny, "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert run["norms"] == [["norm_linear: 3 Linear"], ["norm_linear: 2 Linear"]]
    assert all(len(result["losses"]) == 2 for result in run["results"].values())


def test_the_page_has_what_two_gpus_measured() -> None:
    run = json.loads((ROOT / "benchmarks/results/h200-tensor-parallel.json").read_text())
    page = (ROOT / "docs/adopting.md").read_text()
    assert run["norms"] == [["norm_linear: 3 Linear"], ["norm_linear: 2 Linear"]]
    for name, result in run["results"].items():
        assert result["status"] == "ok"
        assert f"{result['milliseconds']:.2f}" in page
        assert name == "compile" or f"{result['loss error']:.1e}" in page
