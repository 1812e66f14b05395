"""Make a wheel that needs no compiler: kernels built ahead, C++ nodes, and Mojo's runtime.

    python scripts/wheel/wheel.py [--target TARGET ...] [--dtype DTYPE ...] [--torch VERSION ...]
                            [--machine MACHINE]

Without flags it carries everything: kernels of all dtypes for every level of x86-64 CPUs and for
NVIDIA's GPUs, and a node for each version of PyTorch. What is built is kept, so that a second run
compiles only what has changed. It also writes a pure wheel, for machines that this one is not for.
`--machine aarch64` makes one for Arm's CPUs, on any machine that has the C++ compiler for those.
"""

from __future__ import annotations

import argparse
import functools
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import wheel_file
import wheel_kernels
import wheel_nodes
import wheel_runtime
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fused_norm.chain import library
from fused_norm.native.cache import BuildError

ROOT = Path(__file__).resolve().parents[2]
# According to auditwheel: Mojo's runtime needs GLIBC_2.34 and GLIBCXX_3.4.30.
TAG = "py3-none-manylinux_2_35_{}"
LICENSE = "Apache-2.0 WITH LLVM-exception AND LicenseRef-Modular-MAX-Community-License"
LARGEST_BYTES = 14_000_000
PLACE = "fused_norm/prebuilt"


def main(arguments: list[str] | None = None) -> int:
    """Make the wheels and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    targets = ["cpu", *wheel_kernels.ACCELERATORS]
    parser.add_argument("--target", action="append", choices=targets, help="default: all")
    parser.add_argument(
        "--dtype", action="append", choices=wheel_kernels.DTYPES, help="default: all"
    )
    parser.add_argument(
        "--torch", action="append", choices=wheel_nodes.VERSIONS, help="node for it; default: all"
    )
    here = platform.machine()
    parser.add_argument(
        "--machine",
        choices=wheel_kernels.MACHINES,
        default=here if here in wheel_kernels.MACHINES else wheel_kernels.MACHINES[0],
        help="default: this one's",
    )
    parser.add_argument("--no-nodes", action="store_true", help="leave the C++ out")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    console = Console()
    wanted = wheel_kernels.wanted(
        options.target or targets, options.dtype or list(wheel_kernels.DTYPES), options.machine
    )
    versions = [] if options.no_nodes else options.torch or list(wheel_nodes.VERSIONS)
    try:
        # What is missing shows before the build, which takes long.
        wheel_runtime.patchelf()
        if versions:
            wheel_nodes.compiler(options.machine)
        files = build(wanted, versions, options.machine, console)
        options.output.mkdir(parents=True, exist_ok=True)
        path = assemble(files, options.output, options.machine)
    except (BuildError, OSError, subprocess.CalledProcessError) as error:
        console.print(f"FAILED: {error}", markup=False, highlight=False)
        return 1
    size = path.stat().st_size
    console.print(f"{path}: {size / 1e6:.1f} MB, {len(files)} libraries", highlight=False)
    if size > LARGEST_BYTES:
        console.print(f"FAILED: it should be below {LARGEST_BYTES / 1e6:.0f} MB")
        return 1
    return 0


def build(
    wanted: list[wheel_kernels.Kernels], versions: list[str], machine: str, console: Console
) -> dict[str, Path]:
    """Build what is not kept, and return all files under the names that they get.

    Args:
        wanted: The kernels.
        versions: Those of PyTorch to build nodes for.
        machine: The instruction set, as `platform.machine` names it.
        console: Where progress is shown, a line for each file where it is no terminal.
    """
    files = {}
    columns = (
        TextColumn("{task.description:<42}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        makers: dict[str, Callable[[], Path]] = {
            kernels.name: functools.partial(wheel_kernels.compile_kept, kernels)
            for kernels in wanted
        }
        for version in versions:
            makers["chain.so"] = functools.partial(wheel_nodes.compile_chain, machine)
            name = library.file_name(library.NODE, version)
            makers[name] = functools.partial(wheel_nodes.compile_kept, version, machine=machine)
        task = progress.add_task("", total=len(makers))
        for name, make in makers.items():
            progress.update(task, description=name)
            start = time.perf_counter()
            files[name] = make()
            took = time.perf_counter() - start
            if took > 1:
                progress.console.print(f"{name} built in {took:.0f} s", highlight=False)
            progress.advance(task)
    return files


def assemble(files: dict[str, Path], folder: Path, machine: str) -> Path:
    """Write the pure wheel and the one with what was built, and return the latter's path.

    Args:
        files: What was built, under the names that they get.
        folder: Where to.
        machine: The instruction set that they are for.
    """
    return wheel_file.extend(
        pure_wheel(folder),
        folder,
        added=bundle(files, machine),
        licenses=wheel_runtime.licenses(),
        license_expression=LICENSE,
        tag=TAG.format(machine),
    )


def bundle(files: dict[str, Path], machine: str) -> dict[str, bytes]:
    """Return the files to add to the wheel, with the runtime, by their paths in it.

    Args:
        files: What was built, under the names that they get.
        machine: The instruction set that they are for.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lib").mkdir()
        names = wheel_runtime.bundle(folder / "lib", machine)
        for file, built in files.items():
            (folder / file).write_bytes(built.read_bytes())
            wheel_runtime.find(folder / file, names, "$ORIGIN/lib")
        paths = (path for path in folder.rglob("*") if path.is_file())
        return {f"{PLACE}/{path.relative_to(folder)}": path.read_bytes() for path in paths}


def pure_wheel(folder: Path) -> Path:
    """Build the wheel of sources and return its path.

    Args:
        folder: Where to write it.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", name]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (built,) = Path(name).iterdir()
        path = folder / built.name
        path.write_bytes(built.read_bytes())
        return path


if __name__ == "__main__":
    sys.exit(main())
