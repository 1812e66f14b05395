"""What a release uploads, in order, and what must hold before it does."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import hub
from rich.console import Console


class Upload(NamedTuple):
    """One upload: what goes where, and the command that does it."""

    what: str
    where: str
    command: list[str]


def uploads(
    version: str, checkout: Path, dist: Path, repository: str, folder: Path, kernel: str
) -> list[Upload]:
    """Return the uploads of a release in their order.

    The tag comes first, as it can be withdrawn and files of PyPI cannot be replaced. Of those, the
    wheels with kernels come first, so that nobody installs from the sources what has a wheel. All
    can be repeated after one has failed.

    Args:
        version: Of the release.
        checkout: The repository that gets the tag.
        dist: The folder of the wheels and the sdist.
        repository: The name that twine has for the index, such as pypi or testpypi.
        folder: The repository for `kernels`.
        kernel: Its name on the Hub, OWNER/NAME; empty to leave it out.
    """
    tag = f"v{version}"
    files = sorted(dist.iterdir(), key=lambda path: (_rank(path), path.name))
    names = ", ".join(f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)" for path in files)
    message = f"fused_norm {version}"
    git = ["git", "-C", str(checkout)]
    found = [
        Upload(f"the tag {tag}", "this repository", [*git, "tag", "-a", tag, "-m", message]),
        Upload(f"the tag {tag}", "origin", [*git, "push", "origin", tag]),
        Upload(
            names,
            repository,
            [
                *(sys.executable, "-m", "twine", "upload", "--non-interactive", "--skip-existing"),
                *("--repository", repository, *map(str, files)),
            ],
        ),
    ]
    if _commit(checkout, tag) == _commit(checkout, "HEAD"):
        del found[0]
    if kernel:
        branch = f"v{hub.INTERFACE}"
        found.append(
            Upload(
                f"{folder}, of {len(list((folder / 'build').iterdir()))} variants",
                f"the Hub: {kernel}, branch {branch}",
                [
                    *("hf", "upload", kernel, str(folder), ".", "--repo-type", "kernel"),
                    *("--revision", branch, "--commit-message", message),
                ],
            )
        )
    return found


def obstacles(version: str, changelog: str, checkout: Path, flags: Sequence[str]) -> list[str]:
    """Return why a release must not be uploaded now, empty if it may.

    Args:
        version: Of the release.
        changelog: The text of CHANGELOG.md.
        checkout: Where `git status` is asked.
        flags: Of scripts/wheel/wheel.py: they make a part of a wheel.
    """
    heading = next(
        (line for line in changelog.splitlines() if line.startswith("## ")), "## nothing"
    )
    found = []
    if version not in heading.split():
        found.append(f"CHANGELOG.md begins with {heading[3:]!r}, not with {version}")
    command = ["git", "status", "--porcelain"]
    asked = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if said := (asked.stdout + asked.stderr).rstrip():
        found.append(f"git status is not clean:\n{said}")
    if flags:
        found.append(f"{' '.join(flags)} makes a part of the wheels")
    return found


def perform(planned: Sequence[Upload], console: Console, is_meant: bool) -> int:
    """Print the uploads, and run them if that is meant, up to the first that fails.

    Args:
        planned: The uploads.
        console: Where to print.
        is_meant: Whether to upload.

    Returns:
        The exit status of the last command that ran, 0 if none did.
    """
    for number, (what, where, command) in enumerate(planned, 1):
        console.print(f"{number}. {what} -> {where}", markup=False, highlight=False)
        console.print(f"   {shlex.join(command)}", markup=False, highlight=False, soft_wrap=True)
        if is_meant:
            status = subprocess.run(command, check=False).returncode
            if status:
                console.print(
                    f"upload {number} FAILED with exit status {status}; the rest did not run"
                )
                return status
    return 0


def _commit(checkout: Path, name: str) -> str:
    """Return the commit of a tag or branch, empty if there is no such name."""
    command = ["git", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _rank(path: Path) -> int:
    """Return 0 for a wheel with kernels, 1 for the pure one, 2 for the sdist."""
    return 2 if path.suffix != ".whl" else int(path.stem.endswith(hub.PURE))
