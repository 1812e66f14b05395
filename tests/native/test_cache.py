"""Whose folder and files the cache takes: code in it runs, so nobody else may have written it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run_python

from fused_norm.__main__ import main
from fused_norm.chain import library
from fused_norm.native import cache

ANOTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is still to be made."""
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setenv("COLUMNS", "500")
    return tmp_path / "above" / "cache"


def write(text: str = "built") -> Path:
    """Build a file of the cache."""
    path = cache.cache_dir() / "something.so"

    def make(output: Path) -> None:
        output.write_text(text)

    cache.build(path, "something", make, force=False)
    return path


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o022 for path in (folder, *folder.iterdir())}


@pytest.mark.parametrize(
    ("given", "folder"),
    [("~/kernels", "/home/of/a user/kernels"), ("~", "/home/of/a user"), ("/a/~/b", "/a/~/b")],
)
def test_home_in_the_variable(given: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no shell expands it in a file of variables, and a folder named ~ was made."""
    monkeypatch.setenv("HOME", "/home/of/a user")
    monkeypatch.setenv("FUSED_NORM_CACHE_DIR", given)
    assert cache.cache_dir() == Path(folder)


def test_folder_is_the_users_alone_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        write()
    finally:
        os.umask(before)
    for made in (folder, folder.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    assert set(modes(folder).values()) == {0}


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_folder_that_others_may_write_to_is_refused(
    folder: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a library from any other user was loaded if it had a checksum."""
    path = write()
    folder.chmod(mode)
    refused = rf"{folder}: others may write to it \(mode {mode:04o}\).*FUSED_NORM_CACHE_DIR"
    with pytest.raises(cache.BuildError, match=refused):
        cache.is_intact(path)
    with pytest.raises(cache.BuildError, match=refused):
        write()
    with pytest.raises(cache.BuildError, match=refused):
        library.load_node.__wrapped__()
    assert main(["doctor"]) == 1
    assert "others may write to it" in capsys.readouterr().out
    folder.chmod(0o700)
    assert cache.is_intact(path)


@as_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_folder_of_another_is_refused(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.parent.mkdir()
    if kind == "folder":
        folder.mkdir(mode=0o700)
    else:
        # To a folder of ours: its owner may turn it elsewhere.
        (folder.parent / "ours").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "ours")
    os.chown(folder, ANOTHER, ANOTHER, follow_symlinks=False)
    refused = rf"{folder}: it belongs to another user \(uid {ANOTHER}, this is 0\)"
    with pytest.raises(cache.BuildError, match=refused):
        write()
    with pytest.raises(cache.BuildError, match=refused):
        library.is_built(library.NODE)
    assert main(["doctor"]) == 1
    assert "it belongs to another user" in capsys.readouterr().out


def test_link_of_ones_own_is_a_folder(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(parents=True, mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")
    assert cache.is_intact(write())


def test_lock_truncates_nothing(folder: Path, tmp_path: Path) -> None:
    """Regression: the lock was opened for writing through a link, which emptied what it led to."""
    folder.mkdir(parents=True, mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "something.lock").symlink_to(victim)
    with pytest.raises(cache.BuildError, match=r"cannot write something.*something\.lock"):
        write()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_linked_file_counts_as_missing(folder: Path, tmp_path: Path, suffix: str) -> None:
    """Regression: a library was loaded from wherever a link in the cache led."""
    path = write()
    linked, elsewhere = path.with_suffix(suffix), tmp_path / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert not cache.is_intact(path)
    write("again")
    assert not linked.is_symlink()
    assert cache.is_intact(path)
    assert elsewhere.read_bytes() == before


def test_file_that_others_may_write_to_counts_as_missing(folder: Path) -> None:
    path = write()
    path.chmod(0o664)
    assert not cache.is_intact(path)
    assert cache.is_intact(write())


@as_root
def test_file_of_another_counts_as_missing(folder: Path) -> None:
    path = write()
    os.chown(path, ANOTHER, ANOTHER)
    assert not cache.is_intact(path)
    assert cache.is_intact(write())
    assert path.stat().st_uid == 0


def test_pipe_is_not_waited_for(folder: Path) -> None:
    path = write()
    path.unlink()
    os.mkfifo(path)
    assert not cache.is_intact(path)


def test_doctor_fails_where_the_cache_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a file in the folder's place passed for one that can be written."""
    folder.parent.mkdir()
    folder.touch()
    assert main(["doctor"]) == 1
    assert f"cannot write kernels to {folder}" in capsys.readouterr().out
    folder.unlink()
    folder.parent.rmdir()
    folder.parent.touch()
    assert main(["doctor"]) == 1
    assert f"cannot write kernels to {folder}" in capsys.readouterr().out


def test_doctor_leaves_no_folder(folder: Path) -> None:
    assert main(["doctor"]) == 0
    assert not folder.parent.exists()


@pytest.fixture
def anyones(tmp_path: Path) -> Iterator[Path]:
    """A folder as /tmp is, which a user who is not root reaches."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


NOBODY = """
import os, sys, warnings
import torch
import torch.distributed.tensor
import torch.nn.functional as F
import fused_norm as fn
from fused_norm import doctor
from fused_norm.chain import library
from fused_norm.native import cache, compiler
# Who this is cannot see an interpreter's packages where root alone may.
compiler.version = lambda: None
library.compiler = lambda: None
for variable in ("HOME", "XDG_CACHE_HOME", "FUSED_NORM_CACHE_DIR"):
    os.environ.pop(variable, None)
os.environ["TMPDIR"] = sys.argv[1]
os.setgid(12345)
os.setuid(12345)
x, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _ in range(2):
        y = fn.fused_layernorm_linear(x, None, None, weight)
        y.sum().backward()
torch.testing.assert_close(y, F.linear(F.layer_norm(x, (8,)), weight))
path = cache.cache_dir() / "something.so"
cache.build(path, "something", lambda output: output.write_text("built"), force=False)
assert cache.is_intact(path)
print(doctor.report(), path.parent)
"""


def as_nobody(anyones: Path) -> subprocess.CompletedProcess[str]:
    variables = {"FUSED_NORM_PREBUILT": "0", "COLUMNS": "500"}
    return run_python("-c", textwrap.dedent(NOBODY), str(anyones), **variables)


@as_root
def test_without_a_home(anyones: Path) -> None:
    """Regression: without HOME and an entry in the list of users every call raised RuntimeError."""
    result = as_nobody(anyones)
    assert result.returncode == 0, result.stderr
    made = anyones / f"fused_norm-{ANOTHER}"
    assert result.stdout.splitlines()[-1] == f"1 {made}"
    assert (made.stat().st_uid, made.stat().st_mode & 0o777) == (ANOTHER, 0o700)


@as_root
def test_without_a_home_another_came_first(anyones: Path) -> None:
    """Anybody may make a folder of that name: then it is refused, not used."""
    made = anyones / f"fused_norm-{ANOTHER}"
    made.mkdir()
    os.chown(made, ANOTHER + 1, ANOTHER + 1)
    result = as_nobody(anyones)
    assert result.returncode != 0
    assert f"{made}: it belongs to another user (uid {ANOTHER + 1}" in result.stderr
    assert "FUSED_NORM_CACHE_DIR" in result.stderr
