"""The CPU kernels compiled for narrower registers than this machine may have."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from processes import run_python

from fused_norm.native import cpu_features

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names an x86 CPU")
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("x86-64-v3", "float32"), ("x86-64-v3", "bfloat16"), ("x86-64-v4", "bfloat16")],
)
def test_kernels_for_another_cpu(target: str, dtype: str) -> None:
    """Eight lanes, sixteen registers: other tiles; no instructions for bfloat16: other code."""
    if target == "x86-64-v4" and "avx512f" not in cpu_features.flags():
        pytest.skip("no AVX-512 on this machine")
    files = ["tests/op/norm_linear/test_cpu_kernels.py", "tests/test_layernorm_linear.py"]
    command = ["-m", "pytest", "-q", *files, "-k", dtype]
    result = run_python(*command, cwd=ROOT, FUSED_NORM_TARGET_CPU=target)
    assert result.returncode == 0, result.stdout[-4000:]
