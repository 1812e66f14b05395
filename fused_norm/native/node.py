"""A training step in C++, the backward as a node: compiled on request, used where that is done.

A training step on a small shape is spent on the host, a good part of it on Python, in the backward
as well. `node.cpp` is what is left without it. It serves one
version of PyTorch and one of Python, so none comes with the package, and nothing compiles it
unasked: `python -m fused_norm build --autograd` does.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import torch

from fused_norm.native import cache

SOURCE = Path(__file__).resolve().with_name("node.cpp")
HEADERS = sorted(SOURCE.parent.glob("*.h"))
NAME = "the autograd node (C++)"
SWITCH = "FUSED_NORM_AUTOGRAD"


def path() -> Path:
    """Return where the compiled node is kept, for this PyTorch and this Python."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    for header in HEADERS:
        digest.update(header.read_bytes())
    for part in (
        torch.__version__,
        torch.version.git_version,
        sysconfig.get_config_var("SOABI"),
    ):
        digest.update(str(part).encode())
    return cache.cache_dir() / f"node-{digest.hexdigest()[:16]}.so"


def is_built() -> bool:
    """Return whether an intact node is in the cache."""
    return cache.is_intact(path())


def compiler() -> str | None:
    """Return the C++ compiler: `CXX`, or the system's; None where there is none."""
    if chosen := os.environ.get("CXX"):
        return shutil.which(chosen)
    return shutil.which("c++") or shutil.which("g++")


def build(*, force: bool = False) -> Path:
    """Compile the node into the cache and return its path.

    Args:
        force: Compile even if an intact file is there.

    Raises:
        BuildError: If the cache cannot be written, there is no compiler, or it fails.
    """
    library = path()
    cache.build(library, NAME, _compile, force=force)
    return library


@functools.cache
def load() -> ModuleType | None:
    """Return the compiled node, None where there is none or `FUSED_NORM_AUTOGRAD=python`."""
    if os.environ.get(SWITCH) == "python" or not is_built():
        return None
    return import_from(path())


def import_from(library: Path) -> ModuleType:
    """Return the compiled node of a file."""
    loader = importlib.machinery.ExtensionFileLoader("node", str(library))
    spec = importlib.util.spec_from_loader("node", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(output: Path) -> None:
    found = compiler()
    if found is None:
        raise cache.BuildError(f"{NAME} needs a C++ compiler: install g++, or name one in CXX")
    # It imports setuptools, and takes a second.
    from torch.utils.cpp_extension import include_paths, library_paths

    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    command = [
        found,
        "-std=c++20",
        "-O2",
        "-shared",
        "-fPIC",
        # Of pybind11, which PyTorch's headers bring, only what Python's stable ABI has.
        "-DPYBIND11_SIMPLE_GIL_MANAGEMENT",
        "-fvisibility=hidden",
        str(SOURCE),
        "-o",
        str(output),
    ]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [part for folder in folders for part in ("-isystem", folder)]
    command += [f"-L{folder}" for folder in library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    print(f"fused_norm: building {NAME} with {found}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise cache.BuildError(
            f"{found} failed on {NAME} (exit status {result.returncode}):\n{result.stdout[-4000:]}"
        )
    print(
        f"fused_norm: built in {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )
