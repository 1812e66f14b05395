"""Heads of sharded vocabularies in two and four processes, against float64 in one.

All processes run all cases of `head_worker.py` that are asked for, one after another: most of the
time goes into starting them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import head_cases
import pytest
import torch
import torch.distributed as dist
from processes import run_forks

if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

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
    folder = tmp_path_factory.mktemp("shards")
    given = [word for count, names in asked.items() for word in (str(count), json.dumps(names))]
    run_forks("head_worker.py", str(folder), *given)
    found: Said = {}
    for count in asked:
        for file in folder.glob(f"{count}-*.jsonl"):
            for name, wrong in map(json.loads, file.read_text().splitlines()):
                found[count, name] = found.get((count, name), "") + wrong
    return found


def cases() -> Iterator[Any]:
    """Give names and processes; four are slow but for float64 and for the kernels' dtype."""
    for name, count in itertools.product(head_cases.NAMES, (2, 4)):
        is_slow = count == 4 and name.endswith(("; float32", "; bfloat16"))
        yield pytest.param(name, count, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("name", "count"), list(cases()))
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
