"""The examples of whole models run as they are, and find a wrong rewrite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "needed", "counts"),
    [
        ("vit", "timm", "5 of 5 norms fused"),
        pytest.param("llama", "transformers", "5 of 5 norms fused", marks=pytest.mark.slow),
        pytest.param("whisper", "transformers", "12 of 12 norms fused", marks=pytest.mark.slow),
        pytest.param("dit", "diffusers", "5 of 5 norms fused", marks=pytest.mark.slow),
    ],
)
def test_example(name: str, needed: str, counts: str) -> None:
    pytest.importorskip(needed, reason=f"{needed} is not installed: uv sync --group models")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=600,
        # Python looks beside the example alone, where no package is installed.
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts in done.stdout
