"""The oldest Mojo compiler that the extra `compiler` admits builds kernels that pass tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
UV = os.environ.get("UV") or shutil.which("uv")


@pytest.mark.slow
@pytest.mark.skipif(UV is None, reason="uv installs into other environments")
def test_oldest_compiler(tmp_path: Path) -> None:
    oldest = re.search(r'"max-core>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    python = tmp_path / "venv" / "bin" / "python"
    tools = ["pytest", "hypothesis", "expecttest", "numpy", "rich"]
    wanted = [f"max-core=={oldest[1]}.0", f"torch=={torch.__version__.partition('+')[0]}", *tools]
    for command in (
        ["venv", "-q", "--python", sys.executable, str(tmp_path / "venv")],
        ["pip", "install", "-q", "--python", str(python), *wanted],
    ):
        subprocess.run([str(UV), *command], check=True)
    tests = [
        "tests/op/norm_linear/test_cpu_kernels.py",
        "tests/test_layernorm_linear.py",
        "-k",
        "float32",
    ]
    result = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "FUSED_NORM_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert list((tmp_path / "cache").glob("norm_linear_cpu-float32-*.so"))
