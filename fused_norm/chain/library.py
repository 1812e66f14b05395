"""Loads the chain and the node: from the wheel, or compiled on first use by the C++ compiler.

One binary of the chain serves every PyTorch from 2.11 on. The autograd node in C++ saves a training
step some microseconds, and needs a build for each minor version of PyTorch. A wheel has builds for
some, and `python -m fused_norm build --autograd` compiles another. Without a wheel, both are
compiled at the same time on first use; the node takes about 15 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from fused_norm.chain import kernels
from fused_norm.native import cache, prebuilt

FOLDER = Path(__file__).resolve().parent
# For fused_norm's own C++: `python` disables the node, and `0` all of it.
SWITCH = "FUSED_NORM_AUTOGRAD"
# The stable ABI that the chain restricts itself to.
OLDEST_PYTORCH = "0x020b000000000000"


@dataclass(frozen=True)
class Binary:
    """A C++ library.

    Attributes:
        name: What messages call it.
        source: The source file.
        arguments: Additional compiler arguments.
        libraries: The PyTorch libraries that it links.
    """

    name: str
    source: str
    arguments: tuple[str, ...]
    libraries: tuple[str, ...]

    def sources(self) -> list[Path]:
        """Return the files that it is compiled from."""
        main = FOLDER / self.source
        # The node depends only on this header: its build survives other changes of the chain.
        return [main, FOLDER / "chain.h"] if self is NODE else [main, *sorted(FOLDER.glob("*.h"))]

    @property
    def path(self) -> Path:
        """Path of the compiled library, for this PyTorch and this Python."""
        digest = hashlib.sha256(b"".join(each.read_bytes() for each in self.sources()))
        for part in (
            torch.__version__,
            torch.version.git_version,
            sysconfig.get_config_var("SOABI"),
        ):
            digest.update(str(part).encode())
        return cache.cache_dir() / f"{Path(self.source).stem}-{digest.hexdigest()[:16]}.so"


CHAIN = Binary(
    "the chain of a call (C++)",
    "chain.cpp",
    (f"-DTORCH_TARGET_VERSION={OLDEST_PYTORCH}",),
    ("torch_cpu",),
)
# Of pybind11, which comes with PyTorch's headers, only the part that the stable ABI covers.
NODE = Binary(
    "the autograd node (C++)",
    "node.cpp",
    ("-DPYBIND11_SIMPLE_GIL_MANAGEMENT",),
    ("c10", "torch_cpu", "torch_python"),
)


def compiler() -> str | None:
    """Return the C++ compiler: `CXX` or the system's, None if there is none."""
    if chosen := os.environ.get("CXX"):
        return shutil.which(chosen)
    return shutil.which("c++") or shutil.which("g++")


def is_built(binary: Binary) -> bool:
    """Return whether an intact build is in the cache."""
    return cache.is_intact(binary.path)


def build(binary: Binary, *, force: bool = False) -> Path:
    """Compile a library into the cache and return its path.

    Args:
        binary: The library.
        force: Compile even if an intact file is there.

    Raises:
        BuildError: If the cache cannot be written, there is no compiler, or it fails.
    """
    path = binary.path
    cache.build(path, binary.name, functools.partial(_compile, binary), force=force)
    return path


def prebuilt_path(binary: Binary) -> Path | None:
    """Return the library in the package for this PyTorch, None if there is none."""
    folder = prebuilt.folder()
    if folder is None or not torch.compiled_with_cxx11_abi() or (binary is NODE and _other_abi()):
        return None
    found = folder / file_name(binary, _minor_version())
    return found if found.is_file() else None


def _other_abi() -> bool:
    # Python without a GIL, or with debug checks, has another object layout.
    return any(map(sysconfig.get_config_var, ("Py_GIL_DISABLED", "Py_DEBUG")))


def file_name(binary: Binary, version: str) -> str:
    """Return a library's file name in a wheel.

    Args:
        binary: The library.
        version: PyTorch's, such as `2.15`.
    """
    return f"node-torch-{version}.so" if binary is NODE else "chain.so"


def _minor_version(version: str = torch.__version__) -> str:
    return ".".join(version.split(".")[:2])


def is_at_hand() -> bool:
    """Return whether the chain is loaded, or can be: otherwise PyTorch's ops compute all calls."""
    return load() is not None


# A compiler cannot trace this.
is_at_hand.__dict__["_dynamo_marked_constant"] = True

# Called right before the chain is loaded, to end what it replaces; and right after.
before_loading: list[Callable[[], None]] = []
after_loading: list[Callable[[ctypes.CDLL], None]] = []
_lock = threading.RLock()
_loaded: list[ctypes.CDLL | None] = []


def load() -> ctypes.CDLL | None:
    """Return the chain, and register its ops; None if it cannot be built."""
    if not _loaded:
        with _lock:
            if not _loaded:
                _loaded.append(_load())
    return _loaded[0]


def path() -> Path | None:
    """Return the file of the chain, compiled if necessary; None without a compiler."""
    if os.environ.get(SWITCH) == "0":
        return None
    if found := prebuilt_path(CHAIN):
        return found
    if is_built(CHAIN):
        return CHAIN.path
    if compiler() is None:
        return None
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_has_node)
        return build(CHAIN)


def _load() -> ctypes.CDLL | None:
    found = path()
    if found is None:
        return None
    for end in before_loading:
        end()
    library = ctypes.CDLL(str(found))
    library.chain_functions.restype = ctypes.c_void_p
    kernels.tell(library)
    for begin in after_loading:
        begin(library)
    return library


@functools.cache
def load_node() -> ModuleType | None:
    """Return the node, compiled here if necessary, or the wheel's.

    None if it cannot be compiled, if the wheel has none, or if it is disabled.
    """
    if os.environ.get(SWITCH) in ("0", "python") or load() is None:
        return None
    if is_built(NODE) or _has_node():
        return import_node(NODE.path)
    found = prebuilt_path(NODE)
    if found is None:
        return None
    try:
        module = import_node(found)
    except ImportError:
        # A modified PyTorch.
        return None
    return module if _minor_version(module.TORCH) == _minor_version() else None


def is_node_compiled() -> bool:
    """Return whether the first use of the chain compiles the node: not after a failure."""
    is_off = os.environ.get(SWITCH) in ("0", "python") or prebuilt_path(CHAIN) is not None
    return not is_off and not _other_abi() and compiler() is not None


def has_failed() -> bool:
    """Return whether compiling the node on first use has failed."""
    return _failure().exists()


def _failure() -> Path:
    return NODE.path.with_suffix(".failed")


def _has_node() -> bool:
    """Return whether the node is built, trying that once: calls work without it."""
    if not is_node_compiled() or has_failed():
        return False
    try:
        cache.build(NODE.path, NODE.name, _compile_once, force=False)
        return True
    except cache.BuildError as error:
        warnings.warn(
            f"fused_norm goes on in Python, without {NODE.name}, which is tried again by "
            f"`python -m fused_norm build --autograd`: {error}",
            stacklevel=2,
        )
        return False


def _compile_once(output: Path) -> None:
    # Of the processes that wait for the lock, the first one has tried already.
    if has_failed():
        raise cache.BuildError("another process has failed")
    try:
        _compile(NODE, output)
    except cache.BuildError as error:
        # A full disk may have been the reason, and leaves no mark: the next process tries again.
        with contextlib.suppress(OSError):
            _failure().write_text(str(error))
        raise


def import_node(library: Path) -> ModuleType:
    """Return the compiled node of a file."""
    loader = importlib.machinery.ExtensionFileLoader("fused_norm_node", str(library))
    spec = importlib.util.spec_from_loader("fused_norm_node", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def command(binary: Binary, includes: Sequence[str], libraries: Sequence[str]) -> list[str]:
    """Return the command of the C++ compiler, without the output.

    Args:
        binary: The library.
        includes: Folders of headers: PyTorch's and Python's.
        libraries: Folders of PyTorch's libraries.
    """
    arguments = ["-std=c++20", "-O2", "-shared", "-fPIC", str(FOLDER / binary.source)]
    arguments += [*binary.arguments, "-fvisibility=hidden"]
    arguments += ["-ffunction-sections", "-fdata-sections"]
    arguments += [part for folder in includes for part in ("-isystem", folder)]
    arguments += [f"-L{folder}" for folder in libraries]
    arguments += [f"-l{library}" for library in binary.libraries]
    if sys.platform == "darwin":
        return [*arguments, "-undefined", "dynamic_lookup"]
    return [*arguments, "-Wl,--gc-sections", "-s"]


def _concerns_us(record: logging.LogRecord) -> bool:
    """Return False for the warning, at PyTorch's import, about a CUDA toolkit without a GPU."""
    return not str(record.msg).startswith("No CUDA runtime is found")


def _compile(binary: Binary, output: Path) -> None:
    found = compiler()
    if found is None:
        raise cache.BuildError(
            f"{binary.name} needs a C++ compiler: install g++, or name one in CXX"
        )
    logging.getLogger("torch.utils.cpp_extension").addFilter(_concerns_us)
    # This imports setuptools, which takes a second.
    from torch.utils.cpp_extension import include_paths, library_paths

    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    arguments = command(binary, folders, library_paths())
    arguments += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    print(f"fused_norm: building {binary.name} with {found}", file=sys.stderr, flush=True)
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
            f"{found} failed on {binary.name} (exit status {result.returncode}):\n"
            f"{result.stdout[-4000:]}"
        )
    print(
        f"fused_norm: built {binary.name} in {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )
