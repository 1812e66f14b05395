"""Builds, caches and loads the native extensions: the Mojo kernels behind every op.

An extension is one file of this folder, compiled with `mojo build --emit shared-lib`
for one dtype and one target. The result is kept under a key of everything that it depends on: the
Mojo sources, the toolchain, the host CPU and the GPU architecture. Whoever needs a missing
extension first builds it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from fused_norm.native import cache
from fused_norm.native.cache import BuildError, cache_dir
from fused_norm.native.cpu_features import CPU_VARIABLE, compiler_features

PACKAGE = Path(__file__).resolve().parent.parent
DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
CPU_EXTENSIONS = ("norm_linear_cpu", "passes_cpu", "rows_cpu")
GPU_EXTENSIONS = ("passes_gpu", "rows_gpu")
HOPPER_EXTENSION = "norm_linear_sm90"
LAYER_NORM, RMS_NORM = "layer_norm", "rms_norm"


@dataclass(frozen=True)
class Extension:
    """One native extension: a source file for one dtype and one target.

    Attributes:
        name: Stem of a Mojo file in this folder.
        dtype: Name of the dtype that its kernels work on, as in `DTYPES`.
        accelerator: GPU architecture as Mojo names it (`nvidia:sm_90a`), or None for the host CPU.
        folder: Where the source file is, if not in this one.
        norm: The norm that it is built for, where each has a build of its own.
    """

    name: str
    dtype: str
    accelerator: str | None = None
    folder: Path | None = None
    norm: str = LAYER_NORM

    def __str__(self) -> str:
        norm = "" if self.norm == LAYER_NORM else f"{self.norm}, "
        return f"{self.name} ({norm}{self.dtype}, {self.accelerator or 'cpu'})"

    @property
    def source(self) -> Path:
        """The file that is compiled."""
        return (self.folder or PACKAGE / "native") / f"{self.name}.mojo"

    @property
    def path(self) -> Path:
        """Where the built extension is kept."""
        target = (self.accelerator or "cpu").replace(":", "_")
        name = self.name if self.norm == LAYER_NORM else f"{self.name}-{self.norm}"
        key = _key(self.accelerator, self.features)
        return cache_dir() / f"{name}-{self.dtype}-{target}-{key}.so"

    @property
    def features(self) -> tuple[str, ...]:
        """Features of the CPU to compile for that its model may not tell."""
        return () if self.accelerator else compiler_features(self.name)


def source_root() -> Path:
    """Return the folder that holds `op/`: the package when installed, the checkout otherwise."""
    return PACKAGE if (PACKAGE / "op").is_dir() else PACKAGE.parent


def accelerator_of(device: torch.device) -> str:
    """Return the architecture of a GPU as Mojo names it.

    Args:
        device: A CUDA (or ROCm) device.
    """
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return f"amdgpu:{properties.gcnArchName.split(':')[0]}"
    # sm_90a has wgmma and setmaxnreg, which the plain architecture lacks.
    suffix = "a" if properties.major >= 9 else ""
    return f"nvidia:sm_{properties.major}{properties.minor}{suffix}"


def attached_targets() -> list[str]:
    """Return `cpu` and the architecture of every attached GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = (torch.device("cuda", index) for index in range(count))
    return ["cpu", *sorted({accelerator_of(device) for device in devices})]


def extensions(target: str, dtypes: list[str]) -> list[Extension]:
    """Return all that the ops need on a target.

    Args:
        target: `cpu`, or a GPU architecture such as `nvidia:sm_90a`, `sm_90a` or `gfx942`.
        dtypes: Names of the dtypes wanted, as in `DTYPES`.
    """
    if target == "cpu":
        return [Extension(name, dtype) for name in CPU_EXTENSIONS for dtype in dtypes]
    vendor = "" if ":" in target else "amdgpu:" if target.startswith("gfx") else "nvidia:"
    kept = [dtype for dtype in dtypes if dtype != "float64"]
    found = [Extension(name, dtype, vendor + target) for name in GPU_EXTENSIONS for dtype in kept]
    if target.endswith("sm_90a"):
        found += [
            Extension(HOPPER_EXTENSION, dtype, vendor + target, norm=norm)
            for norm in (LAYER_NORM, RMS_NORM)
            for dtype in kept
        ]
    return found


@functools.cache
def load(extension: Extension) -> ModuleType:
    """Return the loaded extension, building it first where that has not been done.

    Args:
        extension: The extension to load.

    Raises:
        BuildError: If it has to be built and cannot be.
    """
    with _load_lock:
        if not is_built(extension):
            build(extension)
        _load_runtime()
        return _import(extension)


def build(extension: Extension, *, force: bool = False) -> Path:
    """Build an extension into the cache and return its path.

    Args:
        extension: The extension to build.
        force: Build even if an intact file is there.

    Raises:
        BuildError: If the cache cannot be written, the compiler is missing, or it fails.
    """
    path = extension.path
    cache.build(path, extension, lambda output: _compile(extension, output), force=force)
    return path


def is_built(extension: Extension) -> bool:
    """Return whether an intact build of the extension is in the cache."""
    return cache.is_intact(extension.path)


_load_lock = threading.RLock()


def _compile(extension: Extension, output: Path) -> None:
    from mojo.run import subprocess_run_mojo

    arguments = [
        "build",
        str(extension.source),
        "-I",
        str(source_root()),
        "-D",
        f"dtype={extension.dtype}",
    ]
    if extension.norm != LAYER_NORM:
        arguments += ["-D", f"{extension.norm}=1"]
    if extension.accelerator:
        arguments += [f"--target-accelerator={extension.accelerator}"]
        arguments += ["--target-cpu", _portable_cpu()]
    elif cpu := os.environ.get(CPU_VARIABLE):
        arguments += ["--target-cpu", cpu]
    if extension.features:
        arguments += ["--target-features", ",".join(f"+{f}" for f in extension.features)]
    print(
        f"fused_norm: building {extension}, kept in {cache_dir()}",
        file=sys.stderr,
        flush=True,
    )
    start = time.perf_counter()
    try:
        result = subprocess_run_mojo(
            [*arguments, "--emit", "shared-lib", "-o", str(output)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=output.parent,
        )
    except (RuntimeError, FileNotFoundError) as error:
        raise BuildError(
            f"fused_norm needs the Mojo compiler to build {extension}: {error}. "
            "Install mojo==1.2.0, or fill the cache ahead with `python -m fused_norm build`."
        ) from error
    if result.returncode != 0 or not output.is_file():
        raise BuildError(
            f"the Mojo compiler failed on {extension} (exit status {result.returncode}):\n"
            f"{result.stdout[-4000:]}"
        )
    print(
        f"fused_norm: built in {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _import(extension: Extension) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(extension.name, str(extension.path))
    spec = importlib.util.spec_from_loader(extension.name, loader)
    assert spec is not None
    with _this_interpreter():
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    return module


@contextmanager
def _this_interpreter() -> Iterator[None]:
    """Have Mojo's runtime use the Python that is running, and leave the environment as it was.

    Types made in Mojo have no `__module__`, which is a DeprecationWarning, and where warnings are
    errors the end of the process.

    Left alone, the runtime asks the first python3 on PATH for its library, and sets variables that
    would make Python subprocesses of this one start with another interpreter's packages.
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


@functools.cache
def _load_runtime() -> None:
    """Load the Mojo runtime, so that an extension runs wherever it was built."""
    modular = importlib.util.find_spec("modular")
    for folder in (modular.submodule_search_locations or []) if modular else []:
        for name in ("libKGENCompilerRTShared.so", "libAsyncRTMojoBindings.so"):
            library = Path(folder) / "lib" / name
            if library.is_file():
                ctypes.CDLL(str(library))


@functools.cache
def gomp_parallel() -> int:
    """Return the address of `GOMP_parallel` in the libgomp that PyTorch computes with, or 0.

    0 stands for a PyTorch without libgomp (macOS); the kernels then use Mojo's own threads.
    """
    name = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    try:
        gomp = ctypes.CDLL(str(name), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return 0
    return ctypes.cast(gomp.GOMP_parallel, ctypes.c_void_p).value or 0


@functools.cache
def _key(accelerator: str | None, features: tuple[str, ...]) -> str:
    """Return a digest of the sources, the toolchain and the host CPU that a build depends on."""
    digest = hashlib.sha256()
    root = source_root()
    sources = [*(root / "op").rglob("*.mojo"), *(PACKAGE / "native").glob("*.mojo")]
    for source in sorted(sources):
        # The puzzle and the MAX registrations are no part of any extension.
        parts = set(source.relative_to(root).parts)
        if not {"puzzle", "max", "register.mojo"} & parts:
            digest.update(source.read_bytes())
    digest.update(importlib.metadata.version("mojo-compiler").encode())
    digest.update((_portable_cpu() if accelerator else _host_cpu()).encode())
    digest.update(",".join(features).encode())
    return digest.hexdigest()[:16]


def _portable_cpu() -> str:
    """Return the CPU that the host side of a GPU extension is compiled for.

    It only launches kernels, so a build for a GPU serves every machine of one instruction set.
    """
    return "x86-64-v2" if platform.machine() in ("x86_64", "AMD64") else "generic"


def _host_cpu() -> str:
    """Return what Mojo's code for the host depends on: the CPU's model and its features."""
    if cpu := os.environ.get(CPU_VARIABLE):
        return cpu
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    fields = ("model name", "flags", "CPU part", "Features")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(fields)}))
