"""Compiles the kernels that a wheel carries, each again only when what it is made of changes."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import cubins
import wheel_cross
import wheel_runtime

from fused_norm.native import build, cache, compiler, levels, prebuilt

# What PyTorch's users have: H100 and H200, A100, B200. The 30 and the 40 series run A100's machine
# code (sm_86 and sm_89 that of sm_80); with their own, the wheel would come to about 17 MB.
ACCELERATORS = ("nvidia:sm_90a", "nvidia:sm_80", "nvidia:sm_100a")
# Instruction sets that wheels are made for; GPU kernels go into the first one's.
MACHINES = ("x86_64", "aarch64")
# Those that most models compute in first, so that a build that is stopped has them.
DTYPES = ("bfloat16", "float32", "float16", "float64")
SOURCES = build.PACKAGE.parent


class Kernels(NamedTuple):
    """An extension to build for a level of CPUs or a GPU architecture."""

    extension: build.Extension
    target: str
    cpu: tuple[str, ...] = ()
    machine: str = MACHINES[0]

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """What the file is called in the wheel."""
        return prebuilt.file_name(self.extension.stem, self.extension.dtype, self.target)

    @property
    def path(self) -> Path:
        """Where what is built is kept."""
        digest = hashlib.sha256()
        for path in sorted(sources(self.extension.source)):
            digest.update(path.read_bytes())
        arguments = build.compile_arguments(self.extension)
        told = [part.replace(str(SOURCES), "") for part in (*arguments, *self.cpu)]
        digest.update("\0".join([compiler.version() or "", *told]).encode())
        stem = self.name.removesuffix(".so")
        return cache.cache_dir() / "wheel" / f"{stem}-{digest.hexdigest()[:16]}.so"


def wanted(targets: list[str], dtypes: list[str], machine: str) -> list[Kernels]:
    """Return what a wheel carries.

    Args:
        targets: `cpu`, and GPU architectures as Mojo names them.
        dtypes: Names of dtypes.
        machine: One of `MACHINES`.
    """
    found = []
    for dtype in dtypes:
        for target in targets:
            for extension in build.extensions(target, [dtype]):
                if not extension.accelerator:
                    found += [
                        Kernels(extension, level.name, level.arguments, machine)
                        for level in levels.LEVELS
                        if level.machine == machine and level.changes(extension.name, dtype)
                    ]
                elif machine == MACHINES[0]:
                    found.append(Kernels(extension, target))
    return found


def compile_kept(kernels: Kernels) -> Path:
    """Return the file of some kernels, compiled unless that has been done.

    Args:
        kernels: What to compile.

    Raises:
        BuildError: If the compiler is missing or fails.
    """
    path = kernels.path
    cache.build(path, kernels, functools.partial(_compile, kernels), force=False)
    if not kernels.extension.accelerator:
        return path
    tool = hashlib.sha256()
    for name in ("cubins.py", "cubin_places.py"):
        tool.update(Path(__file__).with_name(name).read_bytes())
    assembled = path.with_name(f"{path.stem}-{tool.hexdigest()[:8]}.so")
    cache.build(assembled, kernels, functools.partial(_assemble, path), force=False)
    return assembled


def _compile(kernels: Kernels, output: Path) -> None:
    if kernels.machine != platform.machine():
        folder = wheel_runtime.folder(kernels.machine)
        wheel_cross.compile_for(kernels.extension, kernels.cpu, folder, output)
        return
    arguments = [*build.compile_arguments(kernels.extension), *kernels.cpu, "-Xlinker", "-s"]
    compiler.run(kernels.extension, arguments, output)


def _assemble(library: Path, output: Path) -> None:
    shutil.copy(library, output)
    cubins.embed(output)


@functools.cache
def sources(path: Path) -> frozenset[Path]:
    """Return a Mojo file and all files of the package that it is compiled from.

    Args:
        path: The file.
    """
    found: set[Path] = set()
    left = [path]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.add(file)
        left += _imported(file)
    return frozenset(found)


def _imported(path: Path) -> list[Path]:
    found = []
    pattern = r"^\s*(?:from (\.*)([\w.]*) import (?:\(([^)]*)\)|([^\n]*))|import ([\w.]+))"
    for dots, module, several, one, plain in re.findall(pattern, path.read_text(), re.M):
        parts = [part for part in (module or plain).split(".") if part]
        # Two dots name the folder above, as in Python.
        folder = path.parents[len(dots) - 1] if dots else SOURCES
        names = [name.split()[0] for name in (several or one).split(",") if name.split()]
        for candidate in (parts, *([*parts, name] for name in names)):
            at = folder.joinpath(*candidate)
            found += [
                at.with_suffix(".mojo"),
                *(inner / "__init__.mojo" for inner in (at, *at.parents)),
            ]
    return [file for file in found if file.is_relative_to(SOURCES / "op") and file.is_file()]
