"""The contents of a wheel: prebuilt kernels, C++ nodes, and the Mojo runtime that they load.

`scripts/wheel/wheel.py` fills the folder; a checkout and an install from source have none. pip
checks the files as it installs them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from fused_norm.native import levels

FOLDER = Path(__file__).resolve().parent.parent / "prebuilt"
# 0 ignores prebuilt kernels, so that kernels are built for this machine.
SWITCH = "FUSED_NORM_PREBUILT"


def folder() -> Path | None:
    """Return the folder of prebuilt files, None if there is none or it is disabled."""
    return FOLDER if os.environ.get(SWITCH) != "0" and FOLDER.is_dir() else None


def kernels(stem: str, dtype: str, accelerator: str | None) -> Path | None:
    """Return the prebuilt kernels for this machine, None if there are none.

    Args:
        stem: Name of the extension, and of its norm.
        dtype: Name of the dtype.
        accelerator: GPU architecture in Mojo's notation, or None for this CPU.
    """
    found = folder()
    if found is None:
        return None
    if accelerator:
        targets = compatible(accelerator)
    else:
        targets = [level.name for level in levels.of_this_cpu()]
    paths = (found / file_name(stem, dtype, target) for target in targets)
    return next((path for path in paths if path.is_file()), None)


def file_name(stem: str, dtype: str, target: str) -> str:
    """Return the file name of kernels.

    Args:
        stem: Name of the extension, and of its norm.
        dtype: Name of the dtype.
        target: Name of the level, or the architecture in Mojo's notation.
    """
    return f"{stem}-{dtype}-{target.replace(':', '_')}.so"


def compatible(accelerator: str) -> list[str]:
    """Return the architectures whose code a GPU runs, its own first.

    An NVIDIA GPU runs code for an earlier architecture of its generation (8.6 that for 8.0), unless
    the code is specific to one, which the a of sm_90a means.

    Args:
        accelerator: The architecture in Mojo's notation.
    """
    parts = re.fullmatch(r"nvidia:sm_(\d+)(\d)a?", accelerator)
    if parts is None:
        return [accelerator]
    major, minor = parts.groups()
    return [accelerator, *(f"nvidia:sm_{major}{n}" for n in range(int(minor), -1, -1))]
