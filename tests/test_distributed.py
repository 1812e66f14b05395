"""The op family in two processes: DTensors, tensor parallel, DDP and FSDP2, against one process.

Both processes run all cases of `distributed_worker.py` that are asked for, one after another: most
of the time goes into starting them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_cases
import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

TESTS = Path(__file__).parent
# They compile, or differ from others in little.
SLOW = [
    name
    for name in distributed_cases.NAMES
    if ("; compiled" in name and name != "residual; rows of tokens; compiled")
    or name.startswith(("AdaLN by place", "GELU"))
    or "rows of samples" in name
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
    store = tmp_path_factory.mktemp("distributed") / "store"
    command = [sys.executable, str(TESTS / "distributed_worker.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        )
        for rank in range(2)
    ]
    found: dict[str, str] = {}
    try:
        for process in processes:
            output, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
            for name, wrong in map(json.loads, output.splitlines()):
                found[name] = found.get(name, "") + wrong
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in distributed_cases.NAMES
    ],
)
def test_two_processes_as_one(name: str, said: dict[str, str]) -> None:
    assert said[name] == ""
