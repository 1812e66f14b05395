"""A training step in C++, the backward as a node: from the wheel, or compiled on request.

A training step on a small shape is mostly time of the host, and much of that is Python's, in the
backward as well. `node.cpp` does without. A build serves one minor version of PyTorch and, as it
uses only the stable ABI of Python, every version of that. A wheel brings builds for some;
nothing compiles another unasked: `python -m fused_norm build --autograd` does.
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

from fused_norm.native import cache, prebuilt

SOURCE = Path(__file__).resolve().with_name("node.cpp")
NAME = "the autograd node (C++)"
SWITCH = "FUSED_NORM_AUTOGRAD"


def sources() -> list[Path]:
    """Return the files that the node is compiled from."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def path() -> Path:
    """Return where the compiled node is kept, for this PyTorch and this Python."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources()))
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


def prebuilt_path() -> Path | None:
    """Return the node that came with the package for this PyTorch, None where there is none."""
    folder = prebuilt.folder()
    # Without its lock, or with checks of its own, Python lays objects out in another way.
    other_abi = sysconfig.get_config_var("Py_GIL_DISABLED") or sysconfig.get_config_var("Py_DEBUG")
    if folder is None or other_abi or not torch.compiled_with_cxx11_abi():
        return None
    found = folder / file_name(_minor_version())
    return found if found.is_file() else None


def file_name(version: str) -> str:
    """Return what a wheel calls the node for a version of PyTorch.

    Args:
        version: Such as `2.15`.
    """
    return f"node-torch-{version}.so"


def _minor_version() -> str:
    return ".".join(torch.__version__.split(".")[:2])


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
    """Return the node compiled here or that of the wheel, None without or if Python's is asked for.

    `FUSED_NORM_AUTOGRAD=python` asks for it.
    """
    if os.environ.get(SWITCH) == "python":
        return None
    if is_built():
        return import_from(path())
    found = prebuilt_path()
    if found is None:
        return None
    try:
        module = import_from(found)
    except ImportError:
        # A PyTorch that somebody has modified.
        return None
    return module if _minor_version() == module.TORCH else None


def import_from(library: Path) -> ModuleType:
    """Return the compiled node of a file."""
    loader = importlib.machinery.ExtensionFileLoader("node", str(library))
    spec = importlib.util.spec_from_loader("node", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def command(includes: list[str], libraries: list[str]) -> list[str]:
    """Return what a C++ compiler is told, but for the output.

    Args:
        includes: Folders of headers: PyTorch's and Python's.
        libraries: Folders of PyTorch's libraries.
    """
    arguments = ["-std=c++20", "-O2", "-shared", "-fPIC", str(SOURCE)]
    # Only the part of pybind11, which comes with PyTorch's headers, that the stable ABI covers.
    arguments += ["-DPYBIND11_SIMPLE_GIL_MANAGEMENT", "-fvisibility=hidden"]
    arguments += ["-ffunction-sections", "-fdata-sections"]
    arguments += [part for folder in includes for part in ("-isystem", folder)]
    arguments += [f"-L{folder}" for folder in libraries]
    arguments += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    if sys.platform == "darwin":
        return [*arguments, "-undefined", "dynamic_lookup"]
    return [*arguments, "-Wl,--gc-sections", "-s"]


def _compile(output: Path) -> None:
    found = compiler()
    if found is None:
        raise cache.BuildError(f"{NAME} needs a C++ compiler: install g++, or name one in CXX")
    # It imports setuptools, and takes a second.
    from torch.utils.cpp_extension import include_paths, library_paths

    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    arguments = command(folders, library_paths())
    arguments += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    print(f"fused_norm: building {NAME} with {found}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    result = subprocess.run(
        [found, *arguments, "-o", str(output)],
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
