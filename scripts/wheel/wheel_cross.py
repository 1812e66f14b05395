"""Makes libraries for a machine of another instruction set: its runtime is fetched, lld links."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fused_norm.native import build, cache, compiler

# What the runtime's libraries come in, and what a kernel asks for itself.
_PACKAGES = ("mojo-compiler", "max-core")
_NEEDED = ("libKGENCompilerRTShared.so", "libAsyncRTMojoBindings.so")


def runtime(machine: str, libraries: tuple[str, ...]) -> Path:
    """Return a folder with the runtime of a machine, fetched where it is not kept.

    Args:
        machine: Its architecture, such as `aarch64`.
        libraries: Names of the files.

    Raises:
        BuildError: If there is nothing to fetch it with.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    kept = cache.cache_dir() / "wheel" / f"runtime-{machine}-{versions['mojo-compiler']}"
    if kept.is_dir():
        return kept
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise cache.BuildError(f"there is no uv to fetch the runtime for {machine} with")
    cache.make_folder(kept.parent)
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-platform", f"{machine}-manylinux_2_34", "--target", name]
        wanted = [f"{package}=={version}" for package, version in versions.items()]
        subprocess.run([*command, *wanted], check=True)
        found = Path(name) / "found"
        found.mkdir()
        for library in libraries:
            (Path(name) / "modular" / "lib" / library).rename(found / library)
        found.rename(kept)
    return kept


def compile_for(
    extension: build.Extension, cpu: tuple[str, ...], folder: Path, output: Path
) -> None:
    """Compile an extension to an object, and link that.

    Args:
        extension: What to compile.
        cpu: What the compiler is told of the machine.
        folder: With the machine's runtime.
        output: The file to write.

    Raises:
        BuildError: If the compiler or the linker fails.
    """
    arguments = [*build.compile_arguments(extension), *cpu]
    arguments[arguments.index("--emit") + 1] = "object"
    compiled = output.with_suffix(".o")
    compiler.run(extension, arguments, compiled)
    command = [str(_lld()), "-flavor", "gnu", "-shared", "-s", "--gc-sections", str(compiled)]
    command += [*(str(folder / name) for name in _NEEDED), "-o", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise cache.BuildError(f"lld failed on {extension}:\n{result.stderr[-4000:]}")


def _lld() -> Path:
    """Return the linker that the Mojo compiler brings, which is for every machine."""
    spec = importlib.util.find_spec("modular")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / "bin" / "lld").is_file():
            return path
    raise cache.BuildError(f"there is no lld: `{compiler.INSTALL}` installs it")
