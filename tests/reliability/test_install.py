"""A wheel's life in an environment of its own: installed, used, upgraded, uninstalled.

What a wheel carries, and that it writes nothing next to its code, is in test_wheel.py; caches that
are full, damaged or cannot be written, in test_native.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = os.environ.get("UV") or shutil.which("uv")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(UV is None, reason="uv installs into other environments"),
]
USE = """
import torch, fused_norm as fn

x = torch.randn(5, 64, requires_grad=True)
layer = fn.LayerNormLinear(64, 32)
y = layer(x)
y.sum().backward()
ln, linear = layer.to_modules()
torch.testing.assert_close(y, linear(ln(x)))
print(fn.__version__, fn.__file__)
"""


def wheel(folder: Path, version: str) -> Path:
    """Build a wheel of the checkout as it will be in another version, with other kernels."""
    source = folder / f"source-{version}"
    source.mkdir(parents=True)
    for name in ("fused_norm", "op"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("README.md", "LICENSE", "NOTICE", "pyproject.toml"):
        shutil.copy(ROOT / name, source / name)
    for name in ("pyproject.toml", "fused_norm/__init__.py"):
        file = source / name
        file.write_text(file.read_text().replace('"0.1.0"', f'"{version}"'))
    if version != "0.1.0":
        (source / "fused_norm" / "new.py").write_text("")
        kernel = source / "op" / "team.mojo"
        kernel.write_text(kernel.read_text() + "\n# another\n")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(folder.glob(f"*-{version}-*.whl"))


class Environment:
    """A virtual environment that sees the packages of this one, and not the checkout."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.folder = folder

    def pip(self, *arguments: str | Path) -> None:
        """Run an installer."""
        command = [str(UV), "pip", arguments[0], "--offline", "--python", self.python]
        result = subprocess.run(
            [*command, *arguments[1:]], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run Python."""
        unset = {"PYTHONPATH", "VIRTUAL_ENV"}
        return subprocess.run(
            [self.python, "-W", "error", "-c", script],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            env={k: v for k, v in os.environ.items() if k not in unset},
        )

    def content(self) -> set[str]:
        """Return the names of the files that are installed."""
        files = (path for path in self.site.rglob("*") if path.is_file())
        return {str(path.relative_to(self.site)) for path in files if path.suffix != ".pyc"}


def test_life_of_a_wheel(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    before = environment.content()
    assert "No module named 'fused_norm'" in environment.run("import fused_norm").stderr

    for version in ("0.1.0", "0.2.0"):
        environment.pip("install", "--no-deps", wheel(tmp_path / version, version))
        result = environment.run(USE)
        assert result.returncode == 0, result.stderr
        number, file = result.stdout.split()
        assert (number, Path(file).parent.parent) == (version, environment.site)
        # Other kernels are built, and the same ones found where the checkout keeps them.
        assert ("building" in result.stderr) == (version == "0.2.0")
        assert ("fused_norm/new.py" in environment.content()) == (version == "0.2.0")

    environment.pip("install", "--no-deps", next((tmp_path / "0.1.0").glob("*.whl")))
    assert environment.run(USE).stdout.split()[0] == "0.1.0"
    environment.pip("uninstall", "fused-norm")
    assert environment.content() == before
    assert environment.run("import fused_norm").returncode != 0


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_read_only_site_packages(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.pip("install", "--no-deps", wheel(tmp_path, "0.1.0"))
    folders = [environment.site, *(p for p in environment.site.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert environment.run(USE).returncode == 0
    finally:
        for folder in folders:
            folder.chmod(0o755)
