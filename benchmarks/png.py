"""What a plot was drawn from, kept as a text inside its file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from PIL import Image


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
    with Image.open(image) as opened:
        found: str = opened.info.get("Description", "")
        return found
