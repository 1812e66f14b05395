"""Building the C++ node: on request alone, and what is said when it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fused_norm.__main__ import main
from fused_norm.native import cache, node


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSED_NORM_AUTOGRAD", raising=False)
    monkeypatch.setattr(node, "load", node.load.__wrapped__)


def test_nothing_is_compiled_unasked() -> None:
    assert node.load() is None
    assert not node.is_built()


def test_command_line_and_doctor(
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(node, "_compile", lambda path: path.write_bytes(library.read_bytes()))
    monkeypatch.setenv("COLUMNS", "500")
    main(["doctor"])
    assert "fused_norm build --autograd" in capsys.readouterr().out
    assert main(["build", "--autograd"]) == 0
    assert str(node.path()) in capsys.readouterr().out
    assert node.load() is not None
    main(["doctor"])
    assert re.search(r"autograd +C\+\+", capsys.readouterr().out)
    monkeypatch.setenv("FUSED_NORM_AUTOGRAD", "python")
    assert node.load() is None


def test_damaged_file_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_compile", lambda path: path.write_bytes(b"something"))
    path = node.build()
    path.write_bytes(b"another")
    assert node.load() is None


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert main(["build", "--autograd"]) == 1
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_compiler_errors_are_shown(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "SOURCE", tmp_path / "autograd.cpp")
    node.SOURCE.write_text("nonsense here")
    with pytest.raises(cache.BuildError, match=r"(?s)failed on the autograd node.*nonsense"):
        node.build()
    assert not list(cache.cache_dir().glob(".build-*"))
