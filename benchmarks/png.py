"""What a plot was drawn from, kept as a text inside its file."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path


def digest(path: Path) -> str:
    """Return what names the content of a file of results inside the plots drawn from it.

    Args:
        path: The file.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def description(image: Path) -> str:
    """Return the text that a PNG file keeps under `Description`, or an empty string.

    Args:
        image: The file.
    """
    data, position = image.read_bytes(), 8
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        if kind == b"tEXt" and body.startswith(b"Description\0"):
            return body.partition(b"\0")[2].decode("latin-1")
        position += length + 12
    return ""
