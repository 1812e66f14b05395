"""The folder of builds on this machine: each file is built once, and complete or absent.

A process that builds holds a file lock, so that each file is built once. A checksum next to it
tells an intact file from a damaged one, which counts as missing.

The cache contains code that runs, so only its user and root may write to it: another user's folder
is refused, and a link or another user's file counts as missing and is replaced, never followed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "FUSED_NORM_CACHE_DIR"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BuildError(RuntimeError):
    """Says why something could not be built."""


def cache_dir() -> Path:
    """Return the folder of builds.

    It is `FUSED_NORM_CACHE_DIR`, or a folder in the user's cache; for a user without a home, in
    `HOME` or in the system's list of users, a folder among the temporary files.
    """
    if explicit := os.environ.get(VARIABLE):
        # Where a service or a container reads its variables from a file, no shell expands them.
        return Path(os.path.expanduser(explicit)).absolute()
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):
        return Path(os.environ.get("TMPDIR") or "/tmp").absolute() / f"fused_norm-{os.geteuid()}"
    return Path(base).absolute() / "fused_norm"


def check() -> Path:
    """Check that the folder can be written, and return the existing part of its path.

    Raises:
        BuildError: If it cannot be written or made, or others own it or may write to it.
    """
    folder = place = cache_dir()
    while not os.path.lexists(place):
        place = place.parent
    try:
        if place == folder:
            _refuse_of_others(folder)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise _unwritable("kernels", folder, error) from error


def is_intact(path: Path) -> bool:
    """Return whether a file exists as it was built.

    Args:
        path: The file.

    Raises:
        BuildError: If others own its folder or may write to it.
    """
    try:
        _refuse_of_others(path.parent)
        return _read(path.with_suffix(".sha256")) == _digest(path).encode()
    except OSError:
        return False


def build(path: Path, name: object, make: Callable[[Path], None], *, force: bool) -> None:
    """Build a file of the cache if it is not there.

    Args:
        path: The file.
        name: What it is, for messages.
        make: Writes it to the given path, in a separate folder.
        force: Build even if an intact file is there.

    Raises:
        BuildError: If the cache cannot be written, others own it or may write to it, and as `make`
            does.
    """
    try:
        make_folder(path.parent)
        with _locked(path.with_suffix(".lock")):
            if force or not is_intact(path):
                _replace(path, make)
    except OSError as error:
        raise _unwritable(name, path.parent, error) from error


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone.

    Args:
        folder: The folder.

    Raises:
        OSError: If it cannot be made.
        BuildError: If it is there, and others own it or may write to it.
    """
    missing = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
    for part in reversed(missing):
        part.mkdir(mode=0o700, exist_ok=True)
    _refuse_of_others(folder)


def _refuse_of_others(folder: Path) -> None:
    # The owner of a link may redirect it.
    link, found = os.lstat(folder), os.stat(folder)
    if not _is_ours(link) or not _is_ours(found):
        owner = found.st_uid if _is_ours(link) else link.st_uid
        fault = f"it belongs to another user (uid {owner}, this is {os.geteuid()})"
    elif found.st_mode & _OTHERS_WRITE:
        fault = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise BuildError(
        f"fused_norm does not keep kernels in {folder}: {fault}, who could put code there that "
        "would run here. Remove the folder, and it is made again for you alone, or set "
        f"{VARIABLE} to a folder that only you may write to."
    )


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def _unwritable(name: object, folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"fused_norm cannot write {name} to {folder}: {error}. "
        f"Set {VARIABLE} to a folder that can be written."
    )


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        output = Path(folder) / "extension.so"
        make(output)
        # Whatever the umask allows others.
        output.chmod(0o755)
        checksum = output.with_suffix(".sha256")
        checksum.write_text(_digest(output))
        checksum.chmod(0o644)
        # The checksum comes first: a library without one counts as missing.
        os.replace(checksum, path.with_suffix(".sha256"))
        os.replace(output, path)


def _digest(path: Path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not (stat.S_ISREG(found.st_mode) and _is_ours(found)) or found.st_mode & _OTHERS_WRITE:
            raise OSError(errno.EPERM, "not a file that only its user may write to", str(path))
        return file.read()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the system releases should this process die."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
