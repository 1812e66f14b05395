"""Replaces the PTX texts of a GPU extension by machine code (cubins).

Mojo's runtime hands the address of a kernel's text to the driver, which takes either: PTX it would
compile when a kernel is first used, for tenths of a second. A text that cannot be replaced stays,
in the earliest version of PTX that it is in.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cubin_places

# Those of CUDA 12.3 and 12.4. The earliest that has all that the compiler writes.
OLDER_PTX = (b"8.3", b"8.4")


class Module(NamedTuple):
    """A text of PTX in a library, with one kernel: where it starts and ends, and for which GPU."""

    start: int
    end: int
    text: bytes
    architecture: str


class Embedded(NamedTuple):
    """How many kernels a library has, and how many are machine code now."""

    kernels: int
    cubins: int


def modules(content: bytes) -> Iterator[Module]:
    """Yield the texts of PTX with a kernel that are in a library.

    Args:
        content: Of the library.
    """
    for match in re.finditer(rb"\.version \d", content):
        start = content.rfind(b"\0", 0, match.start()) + 1
        end = content.index(b"\0", match.start())
        text = content[start:end]
        target = re.search(rb"^\.target (\w+)", text, re.M)
        if target and b".entry" in text:
            yield Module(start, end, text, target[1].decode())


def count(content: bytes) -> Embedded:
    """Return how many kernels a library has, and how many of them are machine code.

    Args:
        content: Of the library.
    """
    # The header of an ELF file for CUDA.
    cubins = len(re.findall(rb"\x7fELF.{14}\xbe\x00", content, re.S))
    return Embedded(cubins + len(list(modules(content))), cubins)


def assembler() -> Path | None:
    """Return the ptxas that comes with PyTorch's Triton, None without one.

    It is CUDA 12's, so that drivers of CUDA 12 load what it makes.
    """
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if path.is_file():
            return path
    return None


def embed(library: Path) -> Embedded:
    """Put cubins into a library, wherever they fit.

    Args:
        library: The file to change.

    Raises:
        RuntimeError: If there is no ptxas.
    """
    ptxas = assembler()
    if ptxas is None:
        raise RuntimeError("there is no ptxas: install triton")
    content = bytearray(library.read_bytes())
    found = list(modules(bytes(content)))
    code = {(m.start, m.end): _assemble(ptxas, m) for m in found}
    stayed = cubin_places.place(content, code)
    for module in found:
        if (module.start, module.end) in stayed:
            content[module.start : module.end] = _for_older_drivers(ptxas, module)
    library.write_bytes(content)
    return count(bytes(content))


def _for_older_drivers(ptxas: Path, module: Module) -> bytes:
    """Return a text in the earliest PTX version that allows it: older drivers know no later one."""
    for version in OLDER_PTX:
        text = re.sub(rb"\.version \d\.\d", b".version " + version, module.text, count=1)
        try:
            _assemble(ptxas, module._replace(text=text))
        except subprocess.CalledProcessError:
            continue
        return text
    return module.text


def _assemble(ptxas: Path, module: Module) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_bytes(module.text)
        command = [str(ptxas), f"-arch={module.architecture}", "-O3", str(text), "-o", str(cubin)]
        subprocess.run(command, check=True, capture_output=True)
        return cubin.read_bytes()
