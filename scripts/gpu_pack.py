"""Packs for `gpu_round.py` what a GPU machine without Mojo lacks: kernels, their runtime, peers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a kernel needs in addition to PyTorch when it runs.
LIBRARIES = (
    *("libKGENCompilerRTShared.so", "libAsyncRTMojoBindings.so", "libAsyncRTRuntimeGlobals.so"),
    *("libMSupportGlobals.so", "libMGPRT.so", "libNVPTX.so"),
)
# The peers with what they import, and what the tests import.
WHEELS = (
    *("fla-core", "einops", "liger-kernel", "hypothesis", "sortedcontainers", "expecttest"),
    *("cut-cross-entropy", "torchao", "deflate"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def pack(folder: Path, target: str, python: str, only: str | None = None) -> int:
    """Fill a folder with everything that the GPU machine lacks.

    Args:
        folder: The folder.
        target: GPU architecture to build for.
        python: Version of Python on the GPU machine.
        only: `head` for the kernels of the head alone, None for all.
    """
    # `gpu_round.py run` imports this file before its path has the repository.
    from benchmarks.environment import checkout

    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "wheels", ignore_errors=True)
    if only == "head":
        status = _build_head(folder / "kernels", target)
    else:
        shutil.rmtree(folder / "kernels", ignore_errors=True)
        environment = os.environ | {"FUSED_NORM_CACHE_DIR": str(folder / "kernels")}
        build = [sys.executable, "-m", "fused_norm", "build", "--target", target]
        status = subprocess.run(build, env=environment, cwd=ROOT, check=False).returncode
        status = _build_for_tests(folder / "kernels", target) or status
    pack_runtime(folder / "runtime.tar.xz")
    download = [
        *("pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
        *("--python-version", python, "--implementation", "cp", "-d", str(folder / "wheels")),
        *(part for platform in PLATFORMS for part in ("--platform", platform)),
        *WHEELS,
    ]
    status = subprocess.run(download, check=False).returncode or status
    (folder / "commit").write_text(checkout() + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.0f} MiB, {len(list(folder.rglob('*.so')))} kernels")
    return status


def _build_head(kernels: Path, target: str) -> int:
    """Build the kernels of the head, if they are not there."""
    from fused_norm.native import build, cache

    os.environ["FUSED_NORM_CACHE_DIR"] = str(kernels)
    try:
        for extension in build.extensions(target, [build.HEAD_DTYPE]):
            if extension.name == build.HEAD_EXTENSION:
                build.build(extension)
    except cache.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _build_for_tests(kernels: Path, target: str) -> int:
    """Build what only tests and the worklog need: float64, kernels of tests, its steps."""
    from fused_norm.native import build, cache

    os.environ["FUSED_NORM_CACHE_DIR"] = str(kernels)
    accelerator = build.extensions(target, ["float32"])[0].accelerator
    wanted = [build.Extension(n, "float64", accelerator) for n in build.GPU_EXTENSIONS]
    folder = ROOT / "tests" / "mojo"
    for dtype in ("float32", "bfloat16", "float16"):
        for name in ("row_programs", "sm90_entries"):
            wanted.append(build.Extension(name, dtype, accelerator, folder))
    for dtype in ("bfloat16", "float16"):
        wanted.append(build.Extension("sm90_shapes", dtype, accelerator, folder))
    for source in sorted((ROOT / "tutorial/worklog").glob("step*.mojo")):
        wanted.append(build.Extension(source.stem, "bfloat16", accelerator, source.parent))
    try:
        for extension in wanted:
            build.build(extension)
    except cache.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def pack_runtime(path: Path) -> None:
    """Write the runtime's libraries, and the metadata that names the toolchain's version."""
    modular = importlib.util.find_spec("modular")
    assert modular is not None
    (package,) = modular.submodule_search_locations or [""]
    with tarfile.open(path, "w:xz", preset=3) as archive:
        for name in LIBRARIES:
            archive.add(Path(package) / "lib" / name, f"lib/{name}")
        for info in Path(package).parent.glob("mojo_compiler-*.dist-info"):
            archive.add(info / "METADATA", f"{info.name}/METADATA")
