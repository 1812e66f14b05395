"""The wheel, built, installed and used away from the checkout, with nothing built before."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accuracy import as_copies, eager, make_inputs

from fused_norm.chain import library
from fused_norm.native import build

ROOT = Path(__file__).resolve().parents[2]

USE = """
import sys
import torch
import fused_norm as fn
from fused_norm.native import build

inputs, grad_output = torch.load("inputs.pt")
y = fn.fused_layernorm_linear(*inputs)
y.backward(grad_output)
torch.save([y.detach(), *(t.grad for t in inputs)], "results.pt")
print(fn.__file__, build.source_root(), build._key(None, ()), sep="\\n")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that holds ours alone."""
    wheels = tmp_path_factory.mktemp("wheels")
    # The name of a folder of ours, which a search for sources must not take for it.
    site = tmp_path_factory.mktemp("site") / "puzzle"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    if uv := os.environ.get("UV") or shutil.which("uv"):
        installer = [uv, "pip", "install", "--offline", "--python", sys.executable]
    elif importlib.util.find_spec("pip"):
        installer = [sys.executable, "-m", "pip", "install"]
    else:
        pytest.skip("neither uv nor pip is there to install the wheel")
    command = [*installer, "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return site


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_carries_every_source(site: Path) -> None:
    installed = set(content(site / "fused_norm"))
    for root, prefix in ((ROOT / "fused_norm", ""), (ROOT / "op", "op/")):
        sources = {
            prefix + name
            for name in content(root)
            if name.endswith((".py", ".cpp", ".mojo", ".typed", "README.md"))
        }
        assert sources
        assert sources <= installed
    assert not [name for name in installed if name.endswith((".so", ".mojoc", ".pyc"))]


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_works_where_it_is_installed(compiles: bool, site: Path, tmp_path: Path) -> None:
    """It runs forward and backward and reports on itself, and writes nothing next to its code."""
    cache = tmp_path / "cache"
    if not compiles:
        # The same sources, the same build: it uses what a checkout has built.
        cache.mkdir()
        chain, node = library.path(), library.load_node()
        assert chain is not None
        assert node is not None
        extensions = (
            build.Extension(name, "float32") for name in ("norm_linear_cpu", "passes_cpu")
        )
        for built in (*map(build.build, extensions), chain, Path(str(node.__file__))):
            for suffix in (".so", ".sha256"):
                shutil.copyfile(built.with_suffix(suffix), (cache / built.name).with_suffix(suffix))
    environment = os.environ | {
        "PYTHONPATH": str(site),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FUSED_NORM_CACHE_DIR": str(cache),
        "COLUMNS": "500",
    }

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert ("building" in result.stderr) == (compiles and "-c" in arguments)
        return result.stdout

    before = content(site)
    # So large that the host's time does not decide, and a kernel is built.
    inputs = make_inputs((3, 370), 500, 650, requires_grad=True)
    grad_output = torch.randn(3, 370, 650)
    torch.save((inputs, grad_output), tmp_path / "inputs.pt")

    module, root, key = python("-c", USE).splitlines()
    assert Path(module) == site / "fused_norm" / "__init__.py"
    assert Path(root) == site / "fused_norm"
    assert key == build._key(None, ())
    assert {path.suffix for path in cache.iterdir()} - {".lock"} == {".sha256", ".so"}
    # Two extensions, the chain and its node: a call needs no more.
    assert len({path.stem for path in cache.iterdir()}) == 4

    leaves = as_copies(inputs)
    y = eager(*leaves)
    y.backward(grad_output)
    expected = [y.detach(), *(leaf.grad for leaf in leaves)]
    for mine, other in zip(torch.load(tmp_path / "results.pt"), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)

    said = python("-m", "fused_norm", "doctor")
    assert str(cache) in said
    assert "2 of " in said
    assert content(site) == before
