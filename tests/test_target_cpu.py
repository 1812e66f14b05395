"""The CPU kernels compiled for narrower registers than this machine may have."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names an x86 CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_for_avx2(dtype: str) -> None:
    """Eight lanes, sixteen registers, no bfloat16 products: other tiles, other code."""
    files = ["tests/test_cpu_kernels.py", "tests/test_layernorm_linear.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files, "-k", dtype],
        cwd=ROOT,
        env={**os.environ, "FUSED_NORM_TARGET_CPU": "x86-64-v3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
