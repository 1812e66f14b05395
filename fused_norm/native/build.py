"""Finds, builds, caches and loads the native extensions: the Mojo kernels behind every op.

An extension is one file of this folder, compiled with `mojo build --emit shared-lib` for one dtype
and one target. A wheel has builds for common machines. Others are built where the compiler is
installed, and kept under a key of everything that they depend on: the Mojo sources, the toolchain,
the host CPU and the GPU architecture. The first process that needs a missing extension builds it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from fused_norm.native import cache, compiler, prebuilt, runtime
from fused_norm.native.cache import cache_dir
from fused_norm.native.cpu_features import CPU_VARIABLE, compiler_features
from fused_norm.norms import LAYER_NORM, NORMS

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
# Only in bfloat16: products in 8 bits, and the head of a language model.
FP8_EXTENSION = "fp8_sm90"
HEAD_EXTENSION = "head_sm90"
HEAD_DTYPE = "bfloat16"
FOLDED_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Extension:
    """One native extension: a source file for one dtype and one target.

    Attributes:
        name: Stem of a Mojo file in this folder.
        dtype: Name of its kernels' dtype, as in `DTYPES`.
        accelerator: GPU architecture in Mojo's notation (`nvidia:sm_90a`), or None for the host
            CPU.
        folder: Where the source file is, if not in this one.
        norm: The norm that it is built for, if each norm has its own build.
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
    def stem(self) -> str:
        """What the names of its files begin with."""
        return self.name if self.norm == LAYER_NORM else f"{self.name}-{self.norm}"

    @property
    def prebuilt(self) -> Path | None:
        """The file that came with the package for this machine, if there is one."""
        if self.folder or os.environ.get(CPU_VARIABLE):
            return None
        return prebuilt.kernels(self.stem, self.dtype, self.accelerator)

    @property
    def path(self) -> Path:
        """Path of the built extension: in the package, or in the cache."""
        if found := self.prebuilt:
            return found
        target = (self.accelerator or "cpu").replace(":", "_")
        key = _key(self.accelerator, self.features, self.folder)
        return cache_dir() / f"{self.stem}-{self.dtype}-{target}-{key}.so"

    @property
    def features(self) -> tuple[str, ...]:
        """CPU features to compile for that the name of the CPU model may not imply."""
        return () if self.accelerator else compiler_features(self.name)


def source_root() -> Path:
    """Return the folder that holds `op/`: the package when installed, the checkout otherwise."""
    return PACKAGE if (PACKAGE / "op").is_dir() else PACKAGE.parent


def accelerator_of(device: torch.device) -> str:
    """Return the architecture of a GPU in Mojo's notation.

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
    """Return all extensions that the ops need on a target.

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
        # Both norms of a dtype may share one.
        found += dict.fromkeys(hopper_extension(dtype, norm) for norm in NORMS for dtype in kept)
        if HEAD_DTYPE in kept:
            for name in (FP8_EXTENSION, HEAD_EXTENSION):
                found.append(Extension(name, HEAD_DTYPE, vendor + target))
    return found


def hopper_extension(dtype: str, norm: str) -> Extension:
    """Return Hopper's products for a dtype and a norm.

    Args:
        dtype: Name of the dtype.
        norm: Name of the norm. In bfloat16, whose weights are folded, each has its own build.
    """
    own = norm if dtype == FOLDED_DTYPE else LAYER_NORM
    return Extension(HOPPER_EXTENSION, dtype, "nvidia:sm_90a", norm=own)


@functools.cache
def load(extension: Extension) -> ModuleType:
    """Return the loaded extension, built first if necessary.

    Args:
        extension: The extension to load.

    Raises:
        BuildError: If it has to be built and cannot be.
    """
    with _load_lock:
        if found := extension.prebuilt:
            # Its runtime is in the same folder.
            return runtime.import_from(extension.name, found)
        if not is_built(extension):
            build(extension)
        runtime.load()
        return runtime.import_from(extension.name, extension.path)


def build(extension: Extension, *, force: bool = False) -> Path:
    """Build an extension into the cache and return its path.

    Args:
        extension: The extension to build.
        force: Build even if an intact file is there.

    Raises:
        BuildError: If the cache cannot be written, the compiler is missing, or it fails.
    """
    path = extension.path
    if path != extension.prebuilt and (force or not cache.is_intact(path)):
        # Before building is announced, or a folder is made for it.
        compiler.check(extension)
        cache.build(path, extension, lambda output: _compile(extension, output), force=force)
    return path


def is_built(extension: Extension) -> bool:
    """Return whether the extension came with the package, or an intact build is in the cache."""
    return extension.prebuilt is not None or cache.is_intact(extension.path)


def is_at_hand(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels for a dtype are built or can be.

    Args:
        device: The device.
        dtype: One of `DTYPES`.
    """
    return _is_at_hand(device.type, device.index, dtype)


def check_at_hand(device: torch.device, dtype: torch.dtype) -> None:
    """Raise unless the kernels for a dtype are built or can be.

    Args:
        device: The device.
        dtype: One of `DTYPES`.

    Raises:
        BuildError: If there is no compiler to build what is missing.
    """
    if not is_at_hand(device, dtype):
        compiler.check(f"the kernels for {dtype} on {device.type}")


# Otherwise the compiler would trace the search for files. See cpu_features.py.
is_at_hand.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def _is_at_hand(device_type: str, index: int | None, dtype: torch.dtype) -> bool:
    # Only a compiler asks about an absent device, and nothing runs on it.
    if compiler.version() or (device_type == "cuda" and not torch.cuda.is_available()):
        return True
    target = (
        "cpu" if device_type == "cpu" else accelerator_of(torch.device(device_type, index or 0))
    )
    return all(map(is_built, extensions(target, [DTYPES[dtype]])))


_load_lock = threading.RLock()


def compile_arguments(extension: Extension) -> list[str]:
    """Return the arguments of the compiler, except the CPU and the output.

    Args:
        extension: The extension.
    """
    arguments = ["build", str(extension.source), "-I", str(source_root())]
    arguments += ["-D", f"dtype={extension.dtype}", "--emit", "shared-lib"]
    if extension.norm != LAYER_NORM:
        arguments += ["-D", f"{extension.norm}=1"]
    if extension.accelerator:
        arguments += [f"--target-accelerator={extension.accelerator}"]
        arguments += ["--target-cpu", compiler.portable_cpu()]
    return arguments


def _compile(extension: Extension, output: Path) -> None:
    arguments = compile_arguments(extension)
    if not extension.accelerator and (cpu := os.environ.get(CPU_VARIABLE)):
        arguments += ["--target-cpu", cpu]
    if extension.features:
        arguments += ["--target-features", ",".join(f"+{f}" for f in extension.features)]
    print(
        f"fused_norm: building {extension}, kept in {cache_dir()}",
        file=sys.stderr,
        flush=True,
    )
    start = time.perf_counter()
    compiler.run(extension, arguments, output)
    print(
        f"fused_norm: built in {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )


@functools.cache
def gomp_parallel() -> int:
    """Return the address of `GOMP_parallel` in the libgomp that PyTorch computes with, or 0.

    0 means a PyTorch without libgomp (macOS); the kernels then use Mojo's own threads.
    """
    name = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    try:
        gomp = ctypes.CDLL(str(name), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return 0
    return ctypes.cast(gomp.GOMP_parallel, ctypes.c_void_p).value or 0


@functools.cache
def _key(accelerator: str | None, features: tuple[str, ...], folder: Path | None = None) -> str:
    """Return a digest of the sources, the toolchain and the host CPU that a build depends on."""
    digest = hashlib.sha256()
    root = source_root()
    sources = [*(root / "op").rglob("*.mojo"), *(PACKAGE / "native").glob("*.mojo")]
    for source in sorted(sources):
        # The puzzle and the MAX registrations are not part of any extension.
        parts = set(source.relative_to(root).parts)
        if not {"puzzle", "max", "register.mojo"} & parts:
            digest.update(source.read_bytes())
    # An extension outside of the package may import other files in its folder.
    for source in sorted(folder.glob("*.mojo")) if folder else ():
        digest.update(source.read_bytes())
    digest.update((compiler.version() or "").encode())
    digest.update((compiler.portable_cpu() if accelerator else _host_cpu()).encode())
    digest.update(",".join(features).encode())
    return digest.hexdigest()[:16]


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
