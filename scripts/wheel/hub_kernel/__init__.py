"""fused_norm as a kernel of Hugging Face's `kernels`: its functions, and layers that call them.

The package names its modules absolutely and registers PyTorch ops under one name, so a process has
one copy of it: an installed one that was imported earlier serves, if it is of the same version.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

VERSION = "{version}"


def _load() -> None:
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        package = importlib.import_module("fused_norm")
    finally:
        sys.path.remove(folder)
    if package.__version__ != VERSION:
        raise ImportError(
            f"fused_norm {package.__version__} is imported already, and this kernel is {VERSION}"
        )


_load()

from fused_norm import (  # noqa: E402
    fused_layernorm_linear,
    linear_add,
    norm_linear,
    norm_mlp,
)

from . import layers  # noqa: E402

__all__ = ["fused_layernorm_linear", "layers", "linear_add", "norm_linear", "norm_mlp"]
