"""`python -m fused_norm` as a new user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fused_norm as fn
from fused_norm import doctor
from fused_norm.__main__ import main
from fused_norm.chain import library
from fused_norm.native import compiler

ROOT = Path(__file__).parents[1]


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
    assert max(map(len, error.splitlines())) <= 80


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] is (status == 0)
    assert {"python", "torch", "cpu kernels", "built"} <= found["facts"].keys()
    assert not found["must"] or status == 1


@pytest.mark.parametrize(("driver", "is_old"), [("535.183.01", True), ("545.23.06", False)])
def test_doctor_asks_for_the_driver_that_the_pages_name(
    driver: str, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "nvidia_smi", lambda query: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    advice = doctor.Advice()
    doctor._gpus(advice)
    wanted = [f"update the NVIDIA driver: {driver} is older than {doctor.OLDEST_NVIDIA_DRIVER}"]
    assert advice.must == (wanted if is_old else [])
    for page in ("README.md", "docs/support.md", "docs/guide/install.md", "docs/guide/faq.md"):
        assert str(doctor.OLDEST_NVIDIA_DRIVER) in (ROOT / page).read_text(), page


def test_doctor_breaks_lines_but_no_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    advice = doctor.Advice()
    command = "`python -m fused_norm build --target cpu --dtype float32`"
    advice.may.append(f"kernels are built on the first use of each; {command} builds them now")
    doctor._print({"python": "3.11.7"}, advice)
    said = capsys.readouterr().out
    assert command in said
    assert max(map(len, said.splitlines())) <= 80


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
