"""`python -m fused_norm` as a new user types it."""

from __future__ import annotations

import json

import pytest

import fused_norm as fn
from fused_norm.__main__ import main
from fused_norm.chain import library
from fused_norm.native import compiler


def test_help_comes_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("doctor", "build"):
        assert f"\n    {command} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"fused_norm {fn.__version__} (PyTorch ")


@pytest.mark.skipif(compiler.version() is None, reason="there is no Mojo compiler")
@pytest.mark.parametrize("target", ["sm_999", "nvidia:sm_999", "hopper"])
def test_unknown_target(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the compiler's own traceback, after half a minute."""
    with pytest.raises(SystemExit) as exit_:
        main(["build", "--target", target])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert f"unknown target '{target}'" in error
    for known in ("cpu", "sm_90a", "gfx942"):
        assert known in error


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] is (status == 0)
    assert {"python", "torch", "cpu kernels", "built"} <= found["facts"].keys()
    assert not found["must"] or status == 1


def test_doctor_ends_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor"]) == 0
    assert "\nThe kernels can be used. " in capsys.readouterr().out
    monkeypatch.setattr(library, "is_built", lambda binary: False)
    monkeypatch.setattr(library, "prebuilt_path", lambda binary: None)
    monkeypatch.setattr(library, "compiler", lambda: None)
    assert main(["doctor"]) == 1
    said, _, todo = capsys.readouterr().out.rpartition("\nThe kernels cannot be used yet. ")
    assert said
    assert "Install g++" in todo
