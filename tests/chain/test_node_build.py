"""Building the C++ node: on first use and on request, and what is said when it fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import run_python

from fused_norm.__main__ import main
from fused_norm.chain import library as chain
from fused_norm.native import build, cache

Compile = Callable[[chain.Binary, Path], None]

# A call, its backward, and a report, where a compiler is there and fails.
FAILING = """
import warnings
import torch
import fused_norm as fn
from fused_norm.ops import node

torch.manual_seed(0)
x, w = (torch.randn(n, 256, requires_grad=True) for n in (300, 512))
g = torch.rand(256, requires_grad=True)
def run(call):
    y = call(x, g, None, w)
    return [y, *torch.autograd.grad(y.square().sum(), (x, g, w))]
def eager(x, g, b, w):
    return torch.nn.functional.layer_norm(x, (256,), g, b) @ w.T
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        mine = run(fn.fused_layernorm_linear)
for a, b in zip(mine, run(eager), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2)
assert mine[0].grad_fn.name() == "NormLinearBackward", mine[0].grad_fn.name()
assert node.module() is None
for each in caught:
    print(each.message)
"""


@pytest.fixture(scope="module")
def built(library: Path) -> dict[chain.Binary, Path]:
    """What the compiler has written, outside of these tests' cache."""
    path = chain.path()
    assert path is not None
    return {chain.NODE: library, chain.CHAIN: path}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSED_NORM_AUTOGRAD", raising=False)
    monkeypatch.setattr(chain, "load_node", chain.load_node.__wrapped__)


@pytest.fixture
def compiled(
    built: dict[chain.Binary, Path], monkeypatch: pytest.MonkeyPatch
) -> list[chain.Binary]:
    """Copy what the compiler would write, and see what is compiled."""
    calls: list[chain.Binary] = []

    def copy(binary: chain.Binary, output: Path) -> None:
        calls.append(binary)
        shutil.copyfile(built[binary], output)

    monkeypatch.setattr(chain, "_compile", copy)
    return calls


def fails(binary: chain.Binary, output: Path) -> None:
    raise cache.BuildError(f"nonsense in {binary.source}")


def test_importing_compiles_nothing() -> None:
    command = [sys.executable, "-c", "import fused_norm.modules, fused_norm.ops.node"]
    subprocess.run(command, check=True)
    assert not cache.cache_dir().exists()


def test_first_use_compiles_both_once_and_at_the_same_time(
    compiled: list[chain.Binary], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=600)
    copy = chain._compile

    def meet(binary: chain.Binary, output: Path) -> None:
        both.wait()
        copy(binary, output)

    monkeypatch.setattr(chain, "_compile", meet)
    for _ in range(2):
        assert chain.path() == chain.CHAIN.path
        node = chain.load_node()
        assert node is not None
        assert node.__file__ == str(chain.NODE.path)
    assert sorted(each.source for each in compiled) == ["chain.cpp", "node.cpp"]


def test_node_is_compiled_where_the_chain_is_there(compiled: list[chain.Binary]) -> None:
    chain.build(chain.CHAIN)
    assert chain.load_node() is not None
    assert compiled == [chain.CHAIN, chain.NODE]


@pytest.mark.parametrize("reason", ["switched off", "a wheel's chain", "another ABI"])
def test_node_is_not_compiled(
    reason: str, compiled: list[chain.Binary], monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "switched off":
        monkeypatch.setenv("FUSED_NORM_AUTOGRAD", "python")
        assert chain.path() == chain.CHAIN.path
        assert compiled == [chain.CHAIN]
    elif reason == "a wheel's chain":
        # Its users did not ask for a compiler.
        found = {chain.CHAIN: chain.path()}
        compiled.clear()
        chain.NODE.path.unlink()
        monkeypatch.setattr(chain, "prebuilt_path", found.get)
    else:
        monkeypatch.setattr(chain, "_other_abi", lambda: True)
    assert chain.load_node() is None
    assert chain.NODE not in compiled


def test_node_survives_other_changes_of_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(chain.FOLDER, tmp_path / "chain")
    monkeypatch.setattr(chain, "FOLDER", tmp_path / "chain")
    includes = re.findall(r'#include "(.*)"', (chain.FOLDER / "node.cpp").read_text())
    includes += re.findall(r'#include "(.*)"', (chain.FOLDER / "chain.h").read_text())
    assert {each.name for each in chain.NODE.sources()} == {"node.cpp", *includes}

    def changed(name: str) -> list[bool]:
        before = [each.path for each in (chain.CHAIN, chain.NODE)]
        with (chain.FOLDER / name).open("a") as file:
            file.write("// more")
        return [
            each.path != old for each, old in zip((chain.CHAIN, chain.NODE), before, strict=True)
        ]

    assert changed("rows.h") == [True, False]
    assert changed("chain.h") == [True, True]
    assert changed("node.cpp") == [False, True]


def test_command_line_and_doctor(
    compiled: list[chain.Binary],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    main(["doctor"])
    assert re.search(r"autograd +C\+\+, built on first use with", capsys.readouterr().out)
    assert not compiled
    assert main(["build", "--autograd"]) == 0
    assert str(chain.NODE.path) in capsys.readouterr().out
    assert chain.load_node() is not None
    main(["doctor"])
    assert re.search(r"autograd +C\+\+", capsys.readouterr().out)
    monkeypatch.setenv("FUSED_NORM_AUTOGRAD", "python")
    assert chain.load_node() is None


def test_damaged_file_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_compile", lambda binary, path: path.write_bytes(b"something"))
    path = chain.build(chain.NODE)
    path.write_bytes(b"another")
    monkeypatch.setattr(chain, "_compile", fails)
    with pytest.warns(UserWarning, match=r"nonsense in node\.cpp"):
        assert chain.load_node() is None


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert main(["build", "--autograd"]) == 1
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_a_build_for_a_cpu_says_nothing_of_cuda(tmp_path: Path) -> None:
    """Regression: PyTorch's import of what finds its headers warns where a toolkit has no GPU."""
    code = "from fused_norm.chain.library import CHAIN, _compile, cache; import pathlib"
    code += "\ntry: _compile(CHAIN, pathlib.Path('none/x.so'))\nexcept cache.BuildError: pass"
    environment = {"CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    result = run_python("-c", code, CXX=shutil.which("false") or "", **environment)
    assert result.returncode == 0
    assert "fused_norm: building" in result.stderr
    assert "CUDA" not in result.stderr


def test_compiler_errors_are_shown(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FOLDER", tmp_path)
    for source in ("chain.h", chain.NODE.source):
        (tmp_path / source).write_text("nonsense here")
    with pytest.raises(cache.BuildError, match=r"(?s)failed on the autograd node.*nonsense"):
        chain.build(chain.NODE)
    assert not list(cache.cache_dir().glob(".build-*"))


def test_first_use_tries_once(
    compiled: list[chain.Binary],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    chain.build(chain.CHAIN)
    copy = chain._compile
    monkeypatch.setattr(chain, "_compile", fails)
    with pytest.warns(UserWarning, match=r"build --autograd`: nonsense in node\.cpp") as caught:
        assert [chain.load_node() for _ in range(2)] == [None, None]
    assert len(caught) == 1
    main(["doctor"])
    assert re.search(r"autograd +Python; C\+\+ could not be built", capsys.readouterr().out)
    # On request it is tried again, and then in use.
    assert main(["build", "--autograd"]) == 1
    monkeypatch.setattr(chain, "_compile", copy)
    assert main(["build", "--autograd"]) == 0
    assert chain.load_node() is not None


def test_a_full_disk_is_no_error_of_a_call(
    built: dict[chain.Binary, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the compiler cannot write its result, nothing says that it has failed, either."""
    monkeypatch.setattr(chain, "_compile", fails)
    monkeypatch.setattr(chain, "_failure", lambda: tmp_path / "no folder" / "node.failed")
    with pytest.warns(UserWarning, match=r"nonsense in node\.cpp"):
        assert chain.load_node() is None


@pytest.mark.skipif(sys.platform == "darwin", reason="the kernels are of another kind there")
def test_calls_work_where_the_compiler_fails(
    built: dict[chain.Binary, Path], tmp_path: Path
) -> None:
    """One process says so, and the next neither tries nor says it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FUSED_NORM_CACHE_DIR")
        extensions = (
            build.Extension(name, "float32") for name in ("norm_linear_cpu", "passes_cpu")
        )
        there = [*map(build.build, extensions), built[chain.CHAIN]]
    folder = cache.cache_dir()
    folder.mkdir(mode=0o700)
    for path in there:
        for suffix in (".so", ".sha256"):
            shutil.copyfile(path.with_suffix(suffix), folder / f"{path.stem}{suffix}")
    tried = tmp_path / "tried"
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\necho tried >> {tried}\necho nonsense\nexit 3\n")
    compiler.chmod(0o755)

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", FAILING],
            env=os.environ | {"CXX": str(compiler), "FUSED_NORM_PREBUILT": "0"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    first = run()
    assert first.count("fused_norm goes on in Python") == 1
    assert "(exit status 3):\nnonsense" in first
    assert run() == ""
    assert tried.read_text() == "tried\n"
