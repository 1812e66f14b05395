"""The Mojo compiler: whether it is installed, and running it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fused_norm.native.cache import BuildError

INSTALL = "pip install fused-norm[compiler]"


@functools.cache
def version() -> str | None:
    """Return the version of the installed compiler, None if there is none."""
    if importlib.util.find_spec("mojo") is None:
        return None
    try:
        return importlib.metadata.version("mojo-compiler")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(name: object) -> None:
    """Raise if there is no compiler.

    Args:
        name: What is to be built, for messages.

    Raises:
        BuildError: If it is missing.
    """
    if version() is None:
        raise _missing(name, "it is not installed")
    _runner(name)


def run(name: object, arguments: list[str], output: Path) -> None:
    """Run the Mojo compiler.

    Args:
        name: What is built, for messages.
        arguments: Its arguments.
        output: The file to write.

    Raises:
        BuildError: If it is missing or fails.
    """
    runner = _runner(name)
    try:
        result = runner(
            [*arguments, "-o", str(output)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=output.parent,
        )
    except (RuntimeError, FileNotFoundError) as error:
        raise _missing(name, error) from error
    if result.returncode != 0 or not output.is_file():
        raise BuildError(
            f"the Mojo compiler failed on {name} (exit status {result.returncode}):\n"
            f"{result.stdout[-4000:]}"
        )


@functools.cache
def accelerators() -> list[str]:
    """Return the architectures of NVIDIA's and AMD's GPUs that the compiler supports.

    Raises:
        BuildError: If there is no compiler.
    """
    result = _runner("kernels")(
        ["build", "--print-supported-accelerators"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return re.findall(r"^ +((?:sm_|gfx)\w+) ", result.stdout, re.MULTILINE)


def _runner(name: object) -> Callable[..., Any]:
    try:
        from mojo.run import subprocess_run_mojo
    except ImportError as error:
        raise _missing(name, error) from error
    runner: Callable[..., Any] = subprocess_run_mojo
    return runner


def _missing(name: object, why: object) -> BuildError:
    return BuildError(
        f"fused_norm needs the Mojo compiler to build {name}: {why}. `{INSTALL}` installs it."
    )


def portable_cpu() -> str:
    """Return the CPU that the host side of a GPU extension is compiled for.

    The host side only launches kernels, so a GPU build serves every machine of one instruction set.
    """
    return "x86-64-v2" if platform.machine() in ("x86_64", "AMD64") else "generic"
