"""The uploads of a release: listed in order, not run unless that is meant, stopped by a failure."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from processes import run_python
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/wheel"))

import upload  # noqa: E402

WHEELS = [
    *("fused_norm-9.8.7-py3-none-any.whl", "fused_norm-9.8.7-py3-none-manylinux_2_35_x86_64.whl"),
    *("fused_norm-9.8.7-py3-none-manylinux_2_35_aarch64.whl", "fused_norm-9.8.7.tar.gz"),
]
# No index of this name is known to twine, so that nothing can be uploaded.
NOWHERE = "no-such-index"


def git(*arguments: str, folder: Path) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with an origin, the files of a release, and a repository for `kernels`."""
    folder = tmp_path / "checkout"
    git("init", "--quiet", "--bare", str(tmp_path / "origin"), folder=tmp_path)
    git("init", "--quiet", str(folder), folder=tmp_path)
    git("remote", "add", "origin", str(tmp_path / "origin"), folder=folder)
    (folder / ".gitignore").write_text("dist\nbuild\n")
    git("add", ".gitignore", folder=folder)
    git("commit", "--quiet", "-m", "start", folder=folder)
    git("config", "user.name", "a", folder=folder)
    git("config", "user.email", "a@b.c", folder=folder)
    (folder / "dist").mkdir()
    for name in WHEELS:
        (folder / "dist" / name).write_text("")
    (folder / "build/hub/build/torch-cpu").mkdir(parents=True)
    return folder


def planned(checkout: Path, kernel: str = "someone/fused-norm") -> list[upload.Upload]:
    folder = checkout / "build/hub"
    return upload.uploads("9.8.7", checkout, checkout / "dist", NOWHERE, folder, kernel)


def test_order(checkout: Path) -> None:
    found = planned(checkout)
    wheres = [each.where for each in found]
    assert wheres == [
        "this repository",
        "origin",
        NOWHERE,
        "the Hub: someone/fused-norm, branch v1",
    ]
    names = [Path(name).name for name in found[2].command if name.startswith(str(checkout))]
    assert names == [WHEELS[2], WHEELS[1], WHEELS[0], WHEELS[3]]
    assert [each.where for each in planned(checkout, kernel="")] == wheres[:3]


def test_a_dry_run_lists_and_does_nothing(checkout: Path) -> None:
    console = Console(file=StringIO(), width=400)
    assert upload.perform(planned(checkout), console, is_meant=False) == 0
    said = console.file.getvalue()
    assert [f"{n}. " in said for n in (1, 2, 3, 4)] == [True] * 4
    assert "tag -a v9.8.7" in said
    assert "twine upload" in said
    assert "hf upload someone/fused-norm" in said
    assert git("tag", folder=checkout) == ""


def test_uploads_stop_at_the_first_that_fails(checkout: Path) -> None:
    console = Console(file=StringIO(), width=400)
    assert upload.perform(planned(checkout), console, is_meant=True) != 0
    assert git("tag", folder=checkout) == "v9.8.7\n"
    assert "v9.8.7" in git("ls-remote", "--tags", "origin", folder=checkout)
    said = console.file.getvalue()
    assert "upload 3 FAILED" in said
    assert "hf upload" not in said
    # Begun again, it does not fail for the tag that is there.
    assert [each.where for each in planned(checkout)][:2] == ["origin", NOWHERE]
    console = Console(file=StringIO(), width=400)
    assert upload.perform(planned(checkout), console, is_meant=True) != 0
    assert "upload 2 FAILED" in console.file.getvalue()


def test_obstacles(checkout: Path) -> None:
    ready = "# Changelog\n\n## 9.8.7 (2026-12-01)\n\n## 9.8.6\n"
    assert upload.obstacles("9.8.7", ready, checkout, []) == []
    (found,) = upload.obstacles("9.8.7", "## Unreleased\n\n## 9.8.7\n", checkout, [])
    assert "begins with 'Unreleased'" in found
    (found,) = upload.obstacles("9.8.7", ready, checkout, ["--dtype", "float32"])
    assert "makes a part of the wheels" in found
    (checkout / "new.py").write_text("")
    (found,) = upload.obstacles("9.8.7", ready, checkout, [])
    assert "new.py" in found


def test_a_part_is_refused_before_anything_is_built() -> None:
    command = ["scripts/wheel/release.py", "--yes", "--dtype", "float32"]
    done = run_python(*command, cwd=ROOT, timeout=300)
    assert done.returncode != 0
    assert done.stdout.startswith("not uploaded:")
    assert "--dtype float32 makes a part of the wheels" in done.stdout
    assert "changelog  " not in done.stdout
