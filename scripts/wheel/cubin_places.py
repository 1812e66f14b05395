"""Finds places in a library for machine code that replaces texts.

What is longer than its text goes into a segment of its own behind the others, and the code that
hands the text to Mojo's runtime gets the new address and length.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

# Where a text starts and ends in a file.
Span = tuple[int, int]

_ALIGNMENT, _PAGE = 16, 4096
# `lea text(%rip), register` on x86-64; the runtime takes a text in r8, and its length in r9d from
# a `mov` that is close by.
_LEA = re.compile(rb"(?=[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d])")
_LEA_R8, _MOV_R9D, _CLOSE = b"\x4c\x8d\x05", b"\x41\xb9", 64
# Of ELF.
_LOAD, _NOTE, _EXECUTABLE, _READABLE = 1, 4, 1, 4


class Segment(NamedTuple):
    """A part of a file that is loaded: where it starts and ends there and in memory."""

    start: int
    end: int
    address: int
    last: int
    executable: bool


class Use(NamedTuple):
    """Where in a file code holds the distance to a text, and its length."""

    distance: int
    length: int


def place(content: bytearray, cubins: dict[Span, bytes]) -> set[Span]:
    """Write cubins into a library instead of texts, and return the texts that have to stay.

    Args:
        content: Of the library.
        cubins: The machine code for each text.
    """
    uses = _uses(bytes(content), list(cubins))
    longer = {}
    stay = set()
    for (start, end), cubin in cubins.items():
        if start + len(cubin) <= end:
            content[start:end] = cubin + bytes(end - start - len(cubin))
        elif uses[start, end]:
            longer[start, end] = cubin
        else:
            stay.add((start, end))
    if longer:
        _append(content, longer, uses)
    return stay


def _append(content: bytearray, cubins: dict[Span, bytes], uses: dict[Span, list[Use]]) -> None:
    """Write cubins behind all else, have them loaded, and have code name them."""
    segments = list(_segments(bytes(content)))
    content += bytes(-len(content) % _PAGE)
    start, last = len(content), max(segment.last for segment in segments)
    address = -(-last // _PAGE) * _PAGE
    for (begin, end), cubin in cubins.items():
        (moved,) = {s.address - s.start for s in segments if s.start <= begin < s.end}
        by = (len(content) - start + address) - (begin + moved)
        for use in uses[begin, end]:
            (distance,) = struct.unpack_from("<i", content, use.distance)
            struct.pack_into("<i", content, use.distance, distance + by)
            struct.pack_into("<I", content, use.length, len(cubin))
        content[begin:end] = bytes(end - begin)
        content += cubin + bytes(-len(cubin) % _ALIGNMENT)
    size = len(content) - start
    # The note is the linker's, a digest of what it made.
    at = next(at for at, kind in _headers(bytes(content)) if kind == _NOTE)
    values = (_LOAD, _READABLE, start, address, address, size, size, _PAGE)
    struct.pack_into("<IIQQQQQQ", content, at, *values)


def _uses(content: bytes, spans: list[Span]) -> dict[Span, list[Use]]:
    """Return where code names each text, nothing for those that must stay where they are."""
    segments = list(_segments(content))
    named: dict[int, list[int]] = {}
    for segment in segments:
        if segment.executable:
            code = content[segment.start : segment.end]
            for match in _LEA.finditer(code, 0, len(code) - 7):
                (distance,) = struct.unpack_from("<i", code, match.start() + 3)
                target = segment.address + match.start() + 7 + distance
                named.setdefault(target, []).append(segment.start + match.start())
    found = {}
    for start, end in spans:
        inside = next(s for s in segments if s.start <= start < s.end)
        address = start - inside.start + inside.address
        uses = [_use(content, at, end - start) for at in named.get(address, [])]
        is_left = _has_pointer(content, address) or None in uses
        found[start, end] = [] if is_left else [use for use in uses if use]
    return found


def _has_pointer(content: bytes, address: int) -> bool:
    """Return whether data may hold a text's address as another name of it.

    Pointers, and the addends of their relocations, are where a linker aligns them: elsewhere the
    same bytes are there by chance.
    """
    pointer = struct.pack("<Q", address)
    at = content.find(pointer)
    while at % len(pointer) and at >= 0:
        at = content.find(pointer, at + 1)
    return at >= 0


def _use(content: bytes, at: int, length: int) -> Use | None:
    """Return the use of a text whose address is loaded there, None if it is not as usual."""
    first = at - _CLOSE
    moves = content[first : at + _CLOSE]
    wanted = _MOV_R9D + struct.pack("<I", length)
    if content[at : at + 3] != _LEA_R8 or moves.count(wanted) != 1:
        return None
    return Use(at + 3, first + moves.index(wanted) + len(_MOV_R9D))


def _segments(content: bytes) -> Iterator[Segment]:
    for at, kind in _headers(content):
        if kind == _LOAD:
            flags, start, address, _, size, memory = struct.unpack_from("<IQQQQQ", content, at + 4)
            executable = bool(flags & _EXECUTABLE)
            yield Segment(start, start + size, address, address + memory, executable)


def _headers(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield where an ELF file of 64 bits has its program headers, and the kind of each."""
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    for at in range(table, table + size * count, size):
        yield at, struct.unpack_from("<I", content, at)[0]
