"""Heads of sharded vocabularies in two and four processes, against float64 in one.

All processes run all cases of `head_worker.py` that are asked for, one after another: most of the
time goes into starting them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import head_cases
import pytest
import torch
import torch.distributed as dist
from processes import with_root

if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
Said = dict[tuple[int, str], str]


@pytest.fixture(scope="session")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Return what went wrong in each case, in any process."""
    asked: dict[int, list[str]] = {}
    tests = (test_shards_as_one.__name__, test_shards_on_gpus.__name__)
    for item in request.session.items:
        is_on_gpu = getattr(item, "originalname", "") == tests[1]
        if is_on_gpu and item.callspec.params["count"] > torch.cuda.device_count():
            continue
        if getattr(item, "originalname", "") in tests:
            asked.setdefault(item.callspec.params["count"], []).append(item.callspec.params["name"])
    found: Said = {}
    for count, names in asked.items():
        store = tmp_path_factory.mktemp("shards") / "store"
        command = [sys.executable, str(ROOT / "tests/support/head_worker.py")]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(count), str(store), *names],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=with_root(),
            )
            for rank in range(count)
        ]
        try:
            for process in processes:
                output, errors = process.communicate(timeout=600)
                assert process.returncode == 0, errors
                for name, wrong in map(json.loads, output.splitlines()):
                    found[count, name] = found.get((count, name), "") + wrong
        finally:
            for process in processes:
                process.kill()
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", head_cases.NAMES)
def test_shards_as_one(name: str, count: int, said: Said) -> None:
    assert said[count, name] == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", head_cases.GPU_NAMES)
def test_shards_on_gpus(name: str, count: int, said: Said) -> None:
    """A GPU for each process, and NCCL."""
    if count > torch.cuda.device_count():
        pytest.skip("needs a GPU for each process")
    assert said[count, name] == ""
