"""Machine code instead of PTX: the same library, whose code names what was inserted."""

from __future__ import annotations

import ctypes
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fused_norm.chain import library as chain

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/wheel"))

import cubin_places  # noqa: E402
import cubins  # noqa: E402

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or chain.compiler() is None,
    reason="code for x86-64 is compiled and run",
)

PTX = [
    f".version 8.5\n.target sm_90a\n.address_size 64\n.visible .entry {name}() {{ ret; }}"
    for name in ("one", "two_and_longer", "three")
]
# As compiled Mojo hands texts to the runtime: the address in r8, the length in r9.
SOURCE = """
__asm__(".section .rodata\\n.byte 0\\n"
        "first: .asciz \\"{}\\"\\nsecond: .asciz \\"{}\\"\\nthird: .asciz \\"{}\\"\\n.text\\n");
#define NAMED(function, text, length)                                     \\
  extern "C" void function(const char** where, long* size) {{             \\
    register const char* address __asm__("r8");                           \\
    register long bytes __asm__("r9");                                    \\
    __asm__("lea " text "(%%rip), %%r8\\n\\tmov $" length ", %%r9d"          \\
            : "=r"(address), "=r"(bytes));                                \\
    *where = address; *size = bytes;                                      \\
  }}
NAMED(get_first, "first", "{}")
NAMED(get_second, "second", "{}")
extern "C" const char* third_address() {{
  const char* a; __asm__("lea third(%%rip), %0" : "=r"(a)); return a;
}}
// Memory after the file's last byte, which is not to be taken.
char zeros[10000];
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    # For C, and for the assembler.
    texts = [text.replace("\n", "\\\\n") for text in PTX]
    code = tmp_path / "library.cpp"
    code.write_text(SOURCE.format(*texts, len(PTX[0]), len(PTX[1])))
    path = tmp_path / "library.so"
    command = [
        chain.compiler() or "",
        "-O1",
        "-s",
        "-shared",
        "-fPIC",
        "-Wl,--build-id",
        str(code),
    ]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path


def named(path: Path, function: str) -> bytes:
    loaded = ctypes.CDLL(str(path))
    where, size = ctypes.c_void_p(), ctypes.c_long()
    getattr(loaded, function)(ctypes.byref(where), ctypes.byref(size))
    assert set((ctypes.c_char * 10000).in_dll(loaded, "zeros").raw) == {0}
    return ctypes.string_at(where.value or 0, size.value)


def test_code_finds_what_took_the_place_of_its_text(library: Path) -> None:
    content = bytearray(library.read_bytes())
    found = list(cubins.modules(bytes(content)))
    assert [module.architecture for module in found] == ["sm_90a"] * 3
    spans = [(module.start, module.end) for module in found]
    short, long = b"short", bytes(range(256)) * 100
    # The third is named in another way than the runtime is told.
    stay = cubin_places.place(content, dict(zip(spans, (short, long, long), strict=True)))
    assert stay == {spans[2]}
    path = library.with_name("placed.so")
    path.write_bytes(content)
    room = spans[0][1] - spans[0][0]
    assert named(path, "get_first") == short + bytes(room - len(short))
    assert named(path, "get_second") == long
    third = ctypes.CDLL(str(path)).third_address
    third.restype = ctypes.c_char_p
    assert third() == found[2].text


def test_what_is_found_loads_after_its_libraries_are_renamed(library: Path) -> None:
    """patchelf, which the wheel's files go through, keeps what was added."""
    content = bytearray(library.read_bytes())
    spans = [(module.start, module.end) for module in cubins.modules(bytes(content))]
    long = b"\x7fELF" + bytes(range(200)) * 500
    cubin_places.place(content, dict.fromkeys(spans, long))
    path = library.with_name("renamed.so")
    path.write_bytes(content)
    command = ["patchelf", "--set-rpath", "$ORIGIN/" + "lib" * 100, str(path)]
    subprocess.run(command, check=True)
    assert named(path, "get_first") == named(path, "get_second") == long


@pytest.mark.skipif(cubins.assembler() is None, reason="there is no ptxas")
def test_every_kernel_becomes_machine_code(library: Path) -> None:
    before = cubins.count(library.read_bytes())
    assert before == (3, 0)
    # The third stays, and is for older drivers.
    assert cubins.embed(library) == (3, 2)
    assert b".version 8.3" in library.read_bytes()
    assert b".version 8.5" not in library.read_bytes()


@pytest.mark.parametrize("before", range(9))
def test_bytes_that_are_no_pointer(before: int) -> None:
    content = bytes(before) + struct.pack("<Q", 0x52E11) + bytes(5)

    assert cubin_places._has_pointer(content, 0x52E11) == (before % 8 == 0)
