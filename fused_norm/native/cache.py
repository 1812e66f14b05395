"""The folder of what is built on this machine: each file built once, and complete or absent.

A process that builds holds a file lock, so that several build a file only once. A checksum beside
the file tells an intact one from a damaged one, which counts as missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class BuildError(RuntimeError):
    """Says why something could not be built."""


def cache_dir() -> Path:
    """Return the folder of what is built: `FUSED_NORM_CACHE_DIR`, or one in the user's cache."""
    if explicit := os.environ.get("FUSED_NORM_CACHE_DIR"):
        return Path(explicit).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fused_norm"


def is_intact(path: Path) -> bool:
    """Return whether a file is there as it was built."""
    try:
        return path.with_suffix(".sha256").read_text() == _digest(path)
    except OSError:
        return False


def build(path: Path, name: object, make: Callable[[Path], None], *, force: bool) -> None:
    """Build a file of the cache if it is not there.

    Args:
        path: The file.
        name: What it is, for messages.
        make: Writes it to the path that it is given, in a folder of its own.
        force: Build even if an intact file is there.

    Raises:
        BuildError: If the cache cannot be written, and as `make` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if force or not is_intact(path):
                _replace(path, make)
    except OSError as error:
        raise BuildError(
            f"fused_norm cannot write {name} to {path.parent}: {error}. "
            "Set FUSED_NORM_CACHE_DIR to a folder that can be written."
        ) from error


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        output = Path(folder) / "extension.so"
        make(output)
        checksum = output.with_suffix(".sha256")
        checksum.write_text(_digest(output))
        # The checksum comes first: a library without one counts as missing.
        os.replace(checksum, path.with_suffix(".sha256"))
        os.replace(output, path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the system releases should this process die."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
