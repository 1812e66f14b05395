"""Loads extensions into this process, and configures Mojo's runtime for that."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

# Any value names a compiler of PTX, with which Mojo's runtime accepts drivers before 580.
_PTX_COMPILER = "MODULAR_NVPTX_COMPILER_PATH"
_CUDA_13 = 13000


def import_from(name: str, library: Path) -> ModuleType:
    """Return the extension module of a file.

    Args:
        name: The module's name.
        library: The file.
    """
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    with _this_interpreter():
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    return module


@functools.cache
def load() -> None:
    """Load the Mojo runtime of the compiler, so that an extension runs wherever it was built."""
    modular = importlib.util.find_spec("modular")
    for folder in (modular.submodule_search_locations or []) if modular else []:
        for name in ("libKGENCompilerRTShared.so", "libAsyncRTMojoBindings.so"):
            library = Path(folder) / "lib" / name
            if library.is_file():
                ctypes.CDLL(str(library))


def new_launcher(kernels: ModuleType, device: int, stream: int, alone: bool) -> int:
    """Return the context of an extension's calls on a stream.

    Mojo's runtime refuses NVIDIA drivers before 580 (CUDA 13), because of a compiler that nothing
    here needs: a driver of CUDA 12 runs the kernels of a wheel, and those built here as well.

    Args:
        kernels: A GPU extension.
        device: Index of the device.
        stream: PyTorch's raw stream.
        alone: Whether no collective runs at the same time.
    """
    is_older = torch.version.cuda and _driver_version() < _CUDA_13
    if not is_older or _PTX_COMPILER in os.environ:
        return int(kernels.new_launcher(device, stream, int(alone)))
    os.putenv(_PTX_COMPILER, "driver")
    try:
        return int(kernels.new_launcher(device, stream, int(alone)))
    finally:
        os.unsetenv(_PTX_COMPILER)


@functools.cache
def _driver_version() -> int:
    """Return the CUDA version that the driver supports, 13000 for 13.0, and 0 if unknown."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


@contextmanager
def _this_interpreter() -> Iterator[None]:
    """Let Mojo's runtime use the running Python, and restore the environment.

    Types made in Mojo have no `__module__`, which is a DeprecationWarning, and ends the process if
    warnings are errors.

    Otherwise the runtime asks the first python3 on PATH for its library, and sets variables with
    which subprocesses would start with another interpreter's packages.
    """
    os.putenv("MOJO_PYTHON_LIBRARY", "")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "builtin type .* has no", DeprecationWarning)
            yield
    finally:
        for name in ("MOJO_PYTHON_LIBRARY", "PYTHONEXECUTABLE", "PYTHONPATH"):
            if (value := os.environ.get(name)) is None:
                os.unsetenv(name)
            else:
                os.putenv(name, value)
