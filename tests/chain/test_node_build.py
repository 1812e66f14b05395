"""Building the C++ node: on request alone, and what is said when it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fused_norm.__main__ import main
from fused_norm.chain import library as chain
from fused_norm.native import cache


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSED_NORM_AUTOGRAD", raising=False)
    monkeypatch.setattr(chain, "load_node", chain.load_node.__wrapped__)


def test_nothing_is_compiled_unasked() -> None:
    assert chain.load_node() is None
    assert not chain.is_built(chain.NODE)


def test_command_line_and_doctor(
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def copy(binary: chain.Binary, output: Path) -> None:
        output.write_bytes((library if binary is chain.NODE else built).read_bytes())

    built = chain.path()
    monkeypatch.setattr(chain, "_compile", copy)
    monkeypatch.setenv("COLUMNS", "500")
    main(["doctor"])
    assert "fused_norm build --autograd" in capsys.readouterr().out
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
    assert chain.load_node() is None


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert main(["build", "--autograd"]) == 1
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_compiler_errors_are_shown(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FOLDER", tmp_path)
    (tmp_path / chain.NODE.source).write_text("nonsense here")
    with pytest.raises(cache.BuildError, match=r"(?s)failed on the autograd node.*nonsense"):
        chain.build(chain.NODE)
    assert not list(cache.cache_dir().glob(".build-*"))
