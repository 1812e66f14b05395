"""Print what every kernel of an NVIDIA extension takes: registers, spills, memory, instructions.

    python scripts/measure/kernel_resources.py LIBRARY [BEFORE]

With the library of another commit as BEFORE, print only what differs, and fail where a kernel takes
more than it did. Kernels are distinguished by the names that they are given, less the hash at their
end; those of row programs, whose names say little, by the order of what they take. Needs ptxas.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

INSTRUCTION_BYTES = 16
EXECUTABLE = 4


class Resources(NamedTuple):
    """What one kernel takes: registers a thread, bytes, and how many instructions it has."""

    registers: int
    spills: int
    stack: int
    shared: int
    instructions: int


def main() -> int:
    """Print the table and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--arch", default="sm_90a")
    options = parser.parse_args()
    found = resources(options.library, options.arch)
    before = resources(options.before, options.arch) if options.before else {}
    print(f"{'kernel':64} registers spills  stack shared instructions")
    more = 0
    for name in sorted(found.keys() | before.keys()):
        now, then = found.get(name), before.get(name)
        if now == then and options.before:
            continue
        if then:
            print(row(f"- {name}", then))
        if now:
            mark = "+ " if options.before else ""
            print(row(mark + name, now))
        # Instructions may well be more: not all of them run equally often.
        if now and then and any(a > b for a, b in zip(now[:4], then[:4], strict=True)):
            more += 1
    print(f"{len(found)} kernels" + (f", {more} take more than before" if before else ""))
    return int(more > 0)


def row(name: str, took: Resources) -> str:
    """Return a line of the table."""
    registers, *rest = took
    *memory, instructions = rest
    cells = " ".join(f"{number:6}" for number in memory)
    return f"{name:64} {registers:9} {cells} {instructions:12}"


def resources(library: Path, arch: str) -> dict[str, Resources]:
    """Assemble every kernel of a library, and return what each takes, by its name."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        taken = sorted(pool.map(lambda text: assemble(text, arch), ptx(library)))
    seen: Counter[str] = Counter()
    table = {}
    for name, took in taken:
        seen[name] += 1
        table[f"{name} #{seen[name]}" if seen[name] > 1 else name] = took
    return table


def ptx(library: Path) -> Iterator[str]:
    """Yield the modules of PTX that are in a library as text, each with one kernel."""
    for match in re.finditer(rb"\.version \d[^\0]*", library.read_bytes()):
        text = match[0].decode()
        if ".entry" in text:
            yield text


def assembler() -> str:
    """Return the path of ptxas: the system's, or the one that Triton brings."""
    if found := shutil.which("ptxas", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"):
        return found
    triton = importlib.util.find_spec("triton")
    bundled = Path(triton.origin or "").parent / "backends/nvidia/bin/ptxas" if triton else Path()
    if not bundled.is_file():
        raise FileNotFoundError("ptxas is needed, of the CUDA toolkit or of Triton")
    return str(bundled)


def version() -> str:
    """Return the version of ptxas."""
    said = subprocess.run([assembler(), "--version"], capture_output=True, text=True, check=True)
    found: list[str] = re.findall(r"V([\d.]+)", said.stdout)
    return found[0]


def assemble(text: str, arch: str) -> tuple[str, Resources]:
    """Return the name of a module's kernel and what it takes.

    Raises:
        RuntimeError: If the assembler warns, as of wgmma that wait for each other.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        result = subprocess.run(
            [assembler(), "-v", f"-arch={arch}", "-o", f"{folder}/kernel.cubin", str(source)],
            capture_output=True,
            text=True,
            check=True,
        )
        code = code_bytes((Path(folder) / "kernel.cubin").read_bytes())
    said = result.stdout + result.stderr
    if "warning" in said.lower():
        raise RuntimeError(said)

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, said)))

    entry = re.search(r"\.entry ([^\s(]+)", text)
    assert entry
    return re.sub(r"_[0-9a-f]{8,16}$", "", entry[1]), Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes smem"),
        code // INSTRUCTION_BYTES,
    )


def code_bytes(cubin: bytes) -> int:
    """Return the size of the sections of a 64-bit ELF file that can be executed."""
    table = int.from_bytes(cubin[40:48], "little")
    size, count = struct.unpack_from("<HH", cubin, 58)
    total = 0
    for i in range(count):
        _, _, flags, _, _, length = struct.unpack_from("<IIQQQQ", cubin, table + i * size)
        total += length if flags & EXECUTABLE else 0
    return total


if __name__ == "__main__":
    sys.exit(main())
